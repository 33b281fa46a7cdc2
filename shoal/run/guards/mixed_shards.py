"""Mistakes with shards: an error that says what to do instead of torch's own, or of none.

mean.lerp_(parameter, 0.1)      an average of weights; the parameter is a DTensor, the mean is whole
parameter.mul_(mask)            the mask is whole
average + 0.1 * parameter       an operator

In-place methods, and functions of several tensors, are replaced for all tensors: torch asks the
class of the tensor on the left. Operators are replaced for DTensors only: Python asks the right
operand first where its class is derived from that of the left one.

p.tolist(), p.numpy()           torch takes no shards

p.grad.norm()                   a DTensor: each rank has the norm of its shard
p.grad.norm().sqrt()            torch combines the parts
p.grad.norm().item()            torch returns this rank's part: an error
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.kernels import FUNCTIONS_OF_LISTS
from shoal.platform.torch_private.replaced_functions import watch_numbers
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch

_OF_TENSORS = (
    *("add_", "sub_", "mul_", "div_", "lerp_", "copy_", "addcmul_", "addcdiv_"),
    *("add", "sub", "mul", "div", "lerp", "dist", "allclose", "equal", "eq", "ne"),
)
_OF_SHARDS = tuple(
    f"__{side}{name}__"
    for name in ("add", "sub", "mul", "truediv", "matmul", "pow")
    for side in ("", "r", "i")
) + (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    "__getitem__",
    "__setitem__",
    "add",
    "sub",
    "mul",
    "div",
    "matmul",
    "mm",
    "mv",
    "lerp",
    "where",
    "masked_fill_",
    "tolist",
    "numpy",
    "__array__",
)
_OF_TORCH = (
    *("cat", "stack", "add", "sub", "mul", "div", "lerp", "where"),
    *("matmul", "dot", "mm", "addmm", "bmm", "mv", "outer", "einsum", "tensordot"),
    *("embedding", "layer_norm", "batch_norm", "cdist", "dist", "allclose", "equal"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isclose", "maximum", "minimum"),
)
# Functions of C: torch finds those of Python by their names where it asks a class of tensors.
_OF_LAYERS = (
    *("linear", "bilinear", "cosine_similarity", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
_OF_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
_IN_A_STEP = dict.fromkeys(
    ("embedding", *_OF_LAYERS),
    " Inside of compute_loss a layer that is part of no block may be called.",
) | dict.fromkeys(
    _OF_LOSSES,
    " A loss of parameters belongs into compute_loss: zero2 and tensor give whole ones there.",
)
_MIXED = "got mixed torch.Tensor and DTensor"
_MESHES = "different device mesh"
_UNREADABLE = "not supported for tensor subclasses"


def guard_mixed_shards(guarded: GuardedModels) -> Iterator[Removable]:
    """Say what is wrong where a whole tensor meets a shard, if parameters are shards."""
    if guarded.local_model.has_sharded_params:
        yield _mixed.add(guarded)


def _explained(name: str, function: Callable[..., Any], patch: ProcessWidePatch) -> Any:
    """Return `function` with torch's error about whole tensors and shards in our words."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            under = next((guarded.under for guarded in patch.active), "")
            if _UNREADABLE in str(error):
                raise UsageError(
                    f"{name}(){call_site()}{under}: each rank holds a part of this tensor. Take "
                    "whole values from run.weights() or run.gradients(), on all ranks."
                ) from error
            if _MIXED not in str(error) and _MESHES not in str(error):
                raise
            cure = _IN_A_STEP.get(name, "")
            if cure and any(guarded.phase.in_passes for guarded in patch.active):
                raise  # the strategy says more
            instead = (
                "Take whole values from run.weights() or run.gradients(), on all ranks, for an "
                "average of weights for example; or use ddp, where every rank holds whole "
                f"parameters.{cure}"
            )
            if any(guarded.phase.in_passes for guarded in patch.active):
                instead = (
                    "Use ddp, where compute_loss has whole parameters. A penalty c * "
                    "p.pow(2).sum() of all of them is also weight_decay=2 * c of SGD."
                )
            raise UsageError(
                f"{name}{call_site()}{under}: each rank holds a part of a parameter or of its "
                f"gradient, and that part was combined with a whole tensor. {instead}"
            ) from error

    return call


def _install(patch: ProcessWidePatch) -> Callable[[], None]:
    """Replace the functions; return a function that puts them back."""
    places: list[tuple[Any, str]] = [(Tensor, name) for name in _OF_TENSORS]
    places += [(DTensor, name) for name in _OF_SHARDS]
    places += [(F, name) for name in (*_OF_LAYERS, *_OF_LOSSES)]
    places += [(torch, name) for name in (*_OF_TORCH, *FUNCTIONS_OF_LISTS) if hasattr(torch, name)]
    before = []
    for owner, name in places:
        function = getattr(owner, name, None)
        if function is None:
            continue
        before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, _explained(name.strip("_"), function, patch))

    def put_back() -> None:
        for owner, name, own in before:
            if own is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    return put_back


_mixed = ProcessWidePatch(_install)


def guard_partial_numbers(guarded: GuardedModels) -> Iterator[Removable]:
    """Refuse to read numbers of which this rank has a part, if parameters are shards."""
    if guarded.local_model.has_sharded_params:
        yield _numbers.add(guarded)


def _check_number(tensor: DTensor) -> None:
    if any(placement.is_partial() or placement.is_shard() for placement in tensor.placements):
        raise UsageError(
            f"item(){call_site()}: this rank has its part of this number only, that of its shards. "
            "Use x.full_tensor().item() on all ranks; for the norm of all gradients "
            "run.clip_gradients(max_norm) or torch.nn.utils.clip_grad_norm_, for whole ones "
            "run.gradients()."
        )


def _install_watch(_: ProcessWidePatch) -> Any:
    return watch_numbers(_check_number)


_numbers = ProcessWidePatch(_install_watch)
