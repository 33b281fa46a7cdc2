"""The few calls that scripts make beside training: a mean of arrays over ranks, all ranks' arrays,
one rank's.

    mean_loss = shoal.allreduce(loss)                   torch tensors, NumPy arrays, and whatever offers __dlpack__
    all_scores = shoal.allgather(scores)                (JAX, CuPy): the same kind comes back as went in
    start = shoal.broadcast(start, root=0)
    shoal.barrier()

Every call is collective: all ranks make it, in the same order, which is checked. In a world of one
it is a copy. What goes in is not changed, and no gradient flows through."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from shoal.comm.axis import Axis
from shoal.errors import CollectiveFailed, UsageError
from shoal.launch.environment import read

Array = TypeVar("Array")
Operation = Literal["mean", "sum", "min", "max", "product"]
OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def allreduce(value: Array, op: Operation = "mean") -> Array:
    """The element-wise mean, sum, minimum, maximum or product over all ranks. Collective.

    Args: value: of any shape, the same shape and type on every rank; a mean is of floating or
    complex numbers.

    Raises: UsageError: an array or operation that cannot be taken, or `shoal.init()` has not been
        called. CollectiveFailed: ranks make different calls.
    """
    if op not in OPERATIONS:
        raise UsageError(
            f"shoal.allreduce: op='{op}' is not known. Use one of {', '.join(OPERATIONS)}."
        )
    tensor, back = _as_tensor(value, "allreduce")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(
            f"shoal.allreduce: the mean of {_name(tensor)} is no {_name(tensor)}. Use op='sum'."
        )
    if tensor.dtype == torch.bool:
        raise UsageError("shoal.allreduce: bool has no sum. Make it integers first.")
    axis = _axis("allreduce")
    _agree(axis, f"allreduce({_name(tensor)} {tuple(tensor.shape)}, op='{op}')")
    if axis.size > 1 and tensor.numel():
        dtype = tensor.dtype
        if op == "mean" and dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()  # where the mean fits, the sum may not
        dist.all_reduce(tensor, OPERATIONS[op])
        tensor = (tensor / axis.size).to(dtype) if op == "mean" else tensor
    found: Array = back(tensor)
    return found


def allgather(value: Array) -> Array:
    """All ranks' arrays, one after the other along the first dimension, in which they may differ.
    Collective.

    Args: value: of shape (rows, ...); a scalar counts as one row.

    Raises: as `allreduce`.
    """
    tensor, back = _as_tensor(value, "allgather")
    tensor = tensor if tensor.dim() else tensor.view(1)
    axis = _axis("allgather")
    _agree(axis, f"allgather({_name(tensor)} ({', '.join(['rows', *map(str, tensor.shape[1:])])}))")
    if axis.size > 1:
        tensor = _all_rows(axis, tensor)
    found: Array = back(tensor)
    return found


def broadcast(value: Array, root: int = 0) -> Array:
    """The array of rank `root`. Collective.

    Args: value: of the same shape and type on every rank.

    Raises: as `allreduce`; UsageError also where there is no such rank.
    """
    tensor, back = _as_tensor(value, "broadcast")
    axis = _axis("broadcast")
    if not 0 <= root < axis.size:
        raise UsageError(
            f"shoal.broadcast: there is no rank {root}; ranks are 0 to {axis.size - 1}."
        )
    _agree(axis, f"broadcast({_name(tensor)} {tuple(tensor.shape)}, root={root})")
    if axis.size > 1 and tensor.numel():
        dist.broadcast(_bytes(tensor), src=root)
    found: Array = back(tensor)
    return found


def barrier() -> None:
    """Wait until every rank is here. Collective. Raises CollectiveFailed: another rank makes
    another call.
    """
    _agree(_axis("barrier"), "barrier()")


def _all_rows(axis: Axis, tensor: Tensor) -> Tensor:
    rows = torch.zeros(axis.size, dtype=torch.int64)
    rows[axis.rank] = len(tensor)
    counts = axis.all_reduce(rows).tolist()
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    found = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        dist.all_gather([_bytes(each) for each in found], _bytes(padded))
    return torch.cat([each[:count] for each, count in zip(found, counts, strict=True)])


def _axis(call: str) -> Axis:
    """All ranks, as they are known by now. Small messages are of the CPU, which every backend
    of ours takes.
    """
    cpu = torch.device("cpu")
    if dist.is_initialized():
        return Axis(dist.get_rank(), dist.get_world_size(), cpu)
    place = read(os.environ)
    if place.world > 1:
        raise UsageError(
            f"shoal.{call}: this is rank {place.rank} of {place.world}, and they have not met. "
            "Call shoal.init() first."
        )
    return Axis(0, 1, cpu)


def _agree(axis: Axis, call: str) -> None:
    """Raise CollectiveFailed on all ranks unless all make this call: a wrong one would give
    wrong numbers, or hang.
    """
    if axis.size == 1:
        return
    digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
    largest, smallest = axis.all_reduce_max(torch.tensor([digest, -digest])).tolist()
    if largest == -smallest:
        return
    calls = [f"rank {rank} {text}" for rank, text in enumerate(axis.all_gather_str(call))]
    raise CollectiveFailed(
        f"ranks make different calls: {'; '.join(calls)}. All must make the same ones."
    )


def _as_tensor(value: Any, call: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """A contiguous copy of the array, and what makes one of its kind of a tensor. Raises
    UsageError.
    """
    if isinstance(value, Tensor):
        _refuse_odd(value, call)
        device = value.device
        here = device if device.type == "cuda" and "nccl" in _backends() else torch.device("cpu")
        copy = value.detach().to(here, copy=True, memory_format=torch.contiguous_format)
        return copy, lambda tensor: tensor.to(device)
    try:
        if isinstance(value, np.ndarray):
            return _from_numpy(value, call)
        if hasattr(value, "__dlpack__"):
            restore = _from_dlpack(value)
            tensor, back = _as_tensor(from_dlpack(value), call)
            return tensor, lambda tensor: restore(back(tensor))
    except (TypeError, BufferError, RuntimeError) as error:
        raise UsageError(
            f"shoal.{call}: torch cannot take this {type(value).__name__}: {error}."
        ) from None
    raise UsageError(
        f"shoal.{call}: {type(value).__name__} is no array. Pass a torch tensor, a NumPy array, or "
        "what has "
        "__dlpack__; of a number, torch.tensor(number)."
    )


def _from_numpy(value: np.ndarray, call: str) -> tuple[Tensor, Callable[[Tensor], np.ndarray]]:
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(
            f"shoal.{call}: what is masked would count. Pass array.filled(0), or what is to stand "
            "there."
        )
    native = value.dtype.newbyteorder("=")
    return torch.from_numpy(
        np.array(value, native, order="C")
    ), lambda tensor: tensor.numpy().astype(value.dtype, copy=False)


def _refuse_odd(value: Tensor, call: str) -> None:
    if isinstance(value, DTensor):
        raise UsageError(
            f"shoal.{call}: of a DTensor each rank holds its own part. Pass tensor.full_tensor()."
        )
    if value.layout is not torch.strided:
        raise UsageError(
            f"shoal.{call}: the tensor is sparse ({value.layout}). Pass tensor.to_dense()."
        )
    if value.grad_fn is not None and torch.is_grad_enabled():
        raise UsageError(
            f"shoal.{call}: no gradient flows through it, and this tensor has one. Pass "
            "tensor.detach()."
        )


def _from_dlpack(value: Any) -> Callable[[Tensor], Any]:
    """What makes an array of the same library: its `from_dlpack`. Raises UsageError: it cannot
    be found.
    """
    library = type(value).__module__.partition(".")[0]
    has_namespace = hasattr(value, "__array_namespace__")
    namespace = value.__array_namespace__() if has_namespace else sys.modules.get(library)
    make: Callable[[Tensor], Any] | None = getattr(namespace, "from_dlpack", None)
    if make is None:
        raise UsageError(
            f"{library} gives arrays away by __dlpack__, but it has no from_dlpack to take one "
            "back. Pass "
            "torch.from_dlpack(array), and turn what comes back into its array yourself."
        )
    return make


def _backends() -> str:
    return str(dist.get_backend_config()) if dist.is_initialized() else ""


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which every backend carries."""
    return tensor.view(-1).view(torch.uint8)
