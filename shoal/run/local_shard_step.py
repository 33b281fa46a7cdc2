"""Steps of torch's optimizers on this rank's shards as plain tensors.

      parameter, .grad, exp_avg, ...   DTensors, in the optimizer's groups and state, as ever
                  │ their local tensors, which share memory
      kernels     adam(parameters, gradients, averages): one loop, foreach or fused kernel

torch's dispatcher spends more time on an operation of a DTensor than its kernel on a small shard,
and its fast kernels for lists take no DTensors unless they are asked for, and no lists of whole and
sharded tensors at all. An optimizer that steps each number by itself needs none of it.

Only what is divided as its parameter is stepped so. A gradient that the script has computed may be
divided otherwise: it is divided again. What is whole beside a shard, a gradient or state, is left
to DTensors, which refuse it.
"""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.comm.assembly import as_shard
from shoal.optim.traits import is_elementwise
from shoal.platform.torch_private.optimizer_lists import change_step_lists

_stepped: WeakKeyDictionary[Optimizer, list[tuple[Tensor, DTensor]]] = WeakKeyDictionary()
"""Local tensors that a step has been given, each with its parameter."""


def step_local_shards(optimizer: Optimizer) -> None:
    """Let the steps of an optimizer work on local shards, if it is an element-wise one of torch."""
    kind = type(optimizer)
    if (
        optimizer in _stepped
        or not kind.__module__.startswith("torch.optim")
        or not is_elementwise(kind)
    ):
        return
    stepped: list[tuple[Tensor, DTensor]] = []
    _stepped[optimizer] = stepped

    def replace(lists: tuple[list[Tensor | None], ...]) -> None:
        named = [*lists[0]]
        parameters = [p for p in named if isinstance(p, DTensor)]
        lists[1][:] = map(_redivided, lists[1], named)
        if not parameters or not all(_is_aligned(named, values) for values in lists):
            return
        for values in lists:
            values[:] = map(_local, values)
        stepped.extend(
            (local, parameter)
            for local, parameter in zip(lists[0], named, strict=True)
            if isinstance(parameter, DTensor) and local is not None
        )
        increment_version(parameters)  # a graph that has kept them must not go backward any more

    change_step_lists(optimizer, replace, partial(name_local_state, optimizer))


def name_local_state(optimizer: Optimizer) -> None:
    """Move what SGD has written into the state of a local tensor to that of its parameter.

    After each step; and before the state is read, for a step may have failed.
    """
    stepped = _stepped.get(optimizer, [])
    for local, parameter in stepped:
        for key, value in optimizer.state.pop(local, {}).items():
            state = optimizer.state[parameter]
            if state.get(key) is None and value is not None:
                state[key] = as_shard(value, parameter)
    stepped.clear()


def _redivided(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return a gradient divided as its parameter is. Collective if it is divided otherwise."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements or gradient.shape != parameter.shape:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def _is_aligned(parameters: list[Tensor | None], values: list[Tensor | None]) -> bool:
    """Return True if each tensor of a list is divided as its parameter is."""
    if len(values) != len(parameters):
        return not values
    return all(
        value is None or _has_layout(value, parameter)
        for value, parameter in zip(values, parameters, strict=True)
    )


def _has_layout(value: Tensor, parameter: Tensor | None) -> bool:
    if not isinstance(value, DTensor):
        return value.dim() == 0 or not isinstance(parameter, DTensor)
    return (
        isinstance(parameter, DTensor)
        and value.shape == parameter.shape
        and value.placements == parameter.placements
        and value.device_mesh == parameter.device_mesh
    )


def _local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
