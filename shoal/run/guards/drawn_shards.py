"""Random numbers like a weight of which each rank holds a shard: those of the whole, cut.

noise = torch.randn_like(weight)   torch would draw a rank's shard from the start of its stream,
weight.normal_(0, 0.02)            so ranks with one seed would all get the same numbers

Each rank draws for the whole weight and keeps its part, so equal seeds give one device's numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.comm.assembly import shard_like
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch

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


def _install(_: ProcessWidePatch) -> Callable[[], None]:
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


_drawn = ProcessWidePatch(_install)
