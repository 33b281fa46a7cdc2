"""Steps of torch's optimizers on this rank's shards as plain tensors.

      parameter, .grad, exp_avg, ...   DTensors, in the optimizer's groups and state, as ever
                  │ their local tensors, which share memory
      kernels     adam(parameters, gradients, averages): one loop, foreach or fused kernel

torch's dispatcher spends more time on an operation of a DTensor than its kernel on a small shard,
and its fast kernels for lists take no DTensors unless they are asked for, and no lists of whole and
sharded tensors at all. An optimizer that steps each number by itself needs none of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.comm.assembly import as_shard
from shoal.optim.traits import is_elementwise
from shoal.platform.torch_private.optimizer_lists import change_step_lists


def step_local_shards(optimizer: Optimizer) -> None:
    """Let the steps of an optimizer work on local shards, if it is an element-wise one of torch."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and is_elementwise(kind):
        _LocalShards(optimizer)


class _LocalShards:
    """Local shards of the tensors of one optimizer.
    Args: optimizer: an element-wise one of torch.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._stepped: list[tuple[Tensor, DTensor]] = []
        change_step_lists(optimizer, self._replace)
        optimizer.register_step_post_hook(self._name_state)

    def _replace(self, lists: tuple[list[Tensor | None], ...]) -> None:
        parameters = [p for p in lists[0] if isinstance(p, DTensor)]
        if not parameters:
            return
        named = [*lists[0]]
        for values in lists:
            values[:] = map(_local, values)
        self._stepped += (
            (local, parameter)
            for local, parameter in zip(lists[0], named, strict=True)
            if isinstance(parameter, DTensor) and local is not None
        )
        increment_version(parameters)  # a graph that has kept them must not go backward any more

    def _name_state(self, optimizer: Optimizer, *_: Any) -> None:
        """Move what SGD has written into the state of a local tensor to that of its parameter."""
        for local, parameter in self._stepped:
            for key, value in optimizer.state.pop(local, {}).items():
                state = optimizer.state[parameter]
                if state.get(key) is None and value is not None:
                    state[key] = as_shard(value, parameter)
        self._stepped.clear()


def _local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
