"""New tensors like a weight: `weight.new_zeros(...)` gives a whole, plain tensor on this rank.

hidden = next(model.parameters()).new_zeros(layers, rows, width)      in many recurrent models
x = x.to(next(model.parameters()).device)                             in many loops

They ask for a weight's dtype and device alone. Where the weight is a shard, or absent, torch would
give a tensor of the mesh, or one without values.

Random numbers like a weight of which each rank holds a shard: those of the whole, cut.

noise = torch.randn_like(weight)   torch would draw a rank's shard from the start of its stream,
weight.normal_(0, 0.02)            so ranks with one seed would all get the same numbers

Each rank draws for the whole weight and keeps its part, so equal seeds give one device's numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.assembly import shard_like
from shoal.run.guards.call_site import is_called_by_shoal
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch

NEW_TENSORS = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
"""Methods that give a tensor with the dtype and device of another one."""


def guard_new_tensors(guarded: GuardedModels) -> Iterator[Removable]:
    """Give plain tensors where a method of a sharded parameter makes a new one; yield handles."""
    if guarded.local_model.has_sharded_params:
        yield _new_tensors.add(guarded)


def new_tensor_like(
    weight: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Tensor | None:
    """Return what the method `name` of a whole weight on `device` would give.

    None for a tensor of the weight's own shape: that is state of the weight, as an optimizer or an
    average keeps it, and is divided as the weight is.
    """
    plain = torch.empty((), dtype=weight.dtype, device=device)
    made: Tensor = getattr(plain, name)(*args, **kwargs)
    return None if made.shape == weight.shape else made


def _plain(name: str, method: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def call(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, nn.Parameter) and not is_called_by_shoal():
            made = new_tensor_like(self, name, args, kwargs, self.device)
            if made is not None:
                return made
        return method(self, *args, **kwargs)

    return call


def _install(_: ProcessWidePatch) -> Callable[[], None]:
    for name in NEW_TENSORS:
        setattr(DTensor, name, _plain(name, getattr(DTensor, name)))

    def put_back() -> None:
        for name in NEW_TENSORS:
            delattr(DTensor, name)  # DTensor inherits them

    return put_back


_new_tensors = ProcessWidePatch(_install)


_LIKE = ("randn_like", "rand_like")
_IN_PLACE = ("normal_", "uniform_")


def guard_drawn_shards(guarded: GuardedModels) -> Iterator[Removable]:
    """Draw for whole tensors where parameters are shards; yield a handle."""
    if guarded.local_model.has_sharded_params:
        yield _drawn.add(guarded)


def _whole_like(tensor: DTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)


def _drawing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return function(tensor, *args, **kwargs)
        with torch.no_grad():
            drawn = shard_like(function(_whole_like(tensor), *args, **kwargs), tensor)
        return drawn.requires_grad_(bool(kwargs.get("requires_grad")))

    return draw


def _drawing_into(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw_into(tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        with torch.no_grad():
            drawn: Any = shard_like(function(_whole_like(tensor), *args, **kwargs), tensor)
            tensor.to_local().copy_(drawn.to_local())
        return tensor

    return draw_into


def _install_draws(_: ProcessWidePatch) -> Callable[[], None]:
    originals = {name: getattr(torch, name) for name in _LIKE}
    for name, function in originals.items():
        setattr(torch, name, _drawing(function))
    for name in _IN_PLACE:
        setattr(DTensor, name, _drawing_into(getattr(Tensor, name)))

    def put_back() -> None:
        for name, function in originals.items():
            setattr(torch, name, function)
        for name in _IN_PLACE:
            delattr(DTensor, name)

    return put_back


_drawn = ProcessWidePatch(_install_draws)
