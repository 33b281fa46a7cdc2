"""Collectives on arrays for scripts: a mean over ranks, the arrays of all ranks, that of one rank.

    mean_loss = shoal.all_reduce(loss, op="mean")
    all_scores = shoal.all_gather(scores)
    start = shoal.broadcast(start, src=0)
    shoal.barrier()

Arguments are named as in torch.distributed. Arrays are torch tensors and NumPy arrays; the result
has the kind of the argument, which is not changed, and no gradient flows through. Every call is
collective: all ranks must make it, in the same order, which is checked. In a world of one rank, a
call returns a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.comm.row_collectives import gather_rows
from shoal.errors import CollectiveFailed, UsageError
from shoal.launch.environment import own_place

Array = TypeVar("Array")
Operation = Literal["mean", "sum", "min", "max", "product"]
OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
OF_TORCH = {each: name for name, each in OPERATIONS.items()} | {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
}
"""torch's operations, by which they may be named."""


def all_reduce(value: Array, op: Any = None) -> Array:
    """Reduce an array over all ranks, element by element, and return the result. Collective.

    Args:
        value: of any shape, with the same shape and dtype on every rank. A mean needs a floating or
            complex dtype.
        op: mean, sum, min, max or product, or torch's `ReduceOp`. It must be said: torch takes the
            sum without it, and `shoal.allreduce` the mean.

    Raises:
        UsageError: the array or operation is not supported, or `shoal.init()` has not been called.
        CollectiveFailed: ranks make different calls.
    """
    if op is None:
        raise UsageError(
            "shoal.all_reduce: say the operation: op='mean' or op='sum'. Without it torch takes "
            "the sum, and shoal.allreduce the mean."
        )
    op = OF_TORCH.get(op, op)
    if op not in OPERATIONS:
        raise UsageError(
            f"shoal.all_reduce: op='{op}' is not known. Use one of {', '.join(OPERATIONS)}."
        )
    tensor, back = _as_tensor(value, "all_reduce")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(
            f"shoal.all_reduce: the mean of {_name(tensor)} is no {_name(tensor)}. Use op='sum'."
        )
    if tensor.is_complex() and op in ("min", "max"):
        raise UsageError(f"shoal.all_reduce: complex numbers have no {op}. Reduce value.abs().")
    if tensor.is_complex() and op == "product":
        raise UsageError(
            "shoal.all_reduce: no backend multiplies complex numbers. Multiply those of all ranks: "
            "shoal.all_gather(value[None]).prod(0)."
        )
    if tensor.dtype == torch.bool:
        raise UsageError("shoal.all_reduce: bool has no sum. Make it integers first.")
    axis = _axis("all_reduce")
    _check_same_call(axis, f"all_reduce({_name(tensor)} {tuple(tensor.shape)}, op='{op}')")
    if axis.size > 1 and tensor.numel():
        dtype = tensor.dtype
        if op == "mean" and dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()  # the sum may overflow although the mean does not
        dist.all_reduce(tensor, OPERATIONS[op])
        tensor = (tensor / axis.size).to(dtype) if op == "mean" else tensor
    result: Array = back(tensor)
    return result


def all_gather(value: Array) -> Array:
    """Concatenate the arrays of all ranks along the first dimension. Collective.

    Args:
        value: of shape (rows, ...), with the same dtype and the same shape except the first
            dimension on every rank; a scalar counts as one row.

    Raises: as `all_reduce`.
    """
    tensor, back = _as_tensor(value, "all_gather")
    tensor = tensor if tensor.dim() else tensor.view(1)
    axis = _axis("all_gather")
    shape = ", ".join(["rows", *map(str, tensor.shape[1:])])
    _check_same_call(axis, f"all_gather({_name(tensor)} ({shape}))")
    result: Array = back(gather_rows(tensor, axis))
    return result


def broadcast(value: Array, src: int = 0, root: int | None = None) -> Array:
    """Return the array of rank `src` on every rank. Collective.

    Args:
        value: with the same shape and dtype on every rank.
        root: another name of `src`.

    Raises: as `all_reduce`; UsageError also if there is no rank `src`.
    """
    src = src if root is None else root
    tensor, back = _as_tensor(value, "broadcast")
    axis = _axis("broadcast")
    if not 0 <= src < axis.size:
        raise UsageError(
            f"shoal.broadcast: there is no rank {src}; ranks are 0 to {axis.size - 1}."
        )
    _check_same_call(axis, f"broadcast({_name(tensor)} {tuple(tensor.shape)}, src={src})")
    if axis.size > 1 and tensor.numel():
        # As bytes, a dtype that every backend can send.
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=src)
    result: Array = back(tensor)
    return result


def allreduce(value: Array, op: Operation = "mean") -> Array:
    """Return `all_reduce(value, op)`, by Horovod's name and with its default. Collective."""
    return all_reduce(value, op)


allgather = all_gather  # the name in Horovod


def barrier() -> None:
    """Wait until all ranks have called this function. Collective.

    Raises: CollectiveFailed: another rank makes another call.
    """
    _check_same_call(_axis("barrier"), "barrier()")


def _axis(call: str) -> Axis:
    """Return the axis of all ranks of the default group, or of one rank without a group.

    Its device is the CPU: every backend that Shoal starts carries small CPU tensors.

    Raises: UsageError: the launcher started several ranks, and there is no group yet.
    """
    cpu = torch.device("cpu")
    if dist.is_initialized():
        return Axis(dist.get_rank(), dist.get_world_size(), cpu)
    rank_info = own_place()
    if rank_info.world > 1:
        raise UsageError(
            f"shoal.{call}: this is rank {rank_info.rank} of {rank_info.world}, and they have not "
            "met. Call shoal.init() first."
        )
    return Axis(0, 1, cpu)


def _check_same_call(axis: Axis, call: str) -> None:
    """Raise CollectiveFailed on all ranks unless all make this call. Collective.

    Different calls would give wrong values, or wait for ever.
    """
    calls = axis.all_gather_str(call)
    if len(set(calls)) > 1:
        told = "; ".join(f"rank {rank} {text}" for rank, text in enumerate(calls))
        raise CollectiveFailed(f"ranks make different calls: {told}. All must make the same ones.")


def _as_tensor(value: Any, call: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Copy an array into a contiguous tensor that the process group can send.

    Returns: the tensor, and a function that makes an array of the caller's kind of a result.

    Raises: UsageError: the array is not supported.
    """
    if isinstance(value, Tensor):
        _check_dense(value, call)
        device = value.device
        backends = str(dist.get_backend_config()) if dist.is_initialized() else ""
        can_send = device.type == "cuda" and "nccl" in backends
        target = device if can_send else torch.device("cpu")
        copy = value.detach().to(target, copy=True, memory_format=torch.contiguous_format)
        return copy, lambda tensor: tensor.to(device)
    if isinstance(value, np.ndarray):
        return _from_numpy(value, call)
    raise UsageError(
        f"shoal.{call}: {type(value).__name__} is not supported. Pass a torch tensor or a NumPy "
        "array; of a number, torch.tensor(number)."
    )


def _from_numpy(value: np.ndarray, call: str) -> tuple[Tensor, Callable[[Tensor], np.ndarray]]:
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(
            f"shoal.{call}: what is masked would count. Pass array.filled(0), or what is to stand "
            "there."
        )
    native_dtype = value.dtype.newbyteorder("=")  # torch has no other byte order
    try:
        tensor = torch.from_numpy(np.array(value, native_dtype, order="C"))
    except TypeError as error:
        raise UsageError(f"shoal.{call}: torch cannot take this array: {error}.") from None
    return tensor, lambda result: result.numpy().astype(value.dtype, copy=False)


def _check_dense(value: Tensor, call: str) -> None:
    """Raise UsageError for a DTensor, a sparse tensor, or a tensor with a gradient."""
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


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
