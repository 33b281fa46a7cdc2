"""Tensors that an optimizer keeps in attributes of its own, beside its groups and its state.

self.slow = [p.clone() for p in params]   a tensor for each parameter, found by its position
self.params = list(params)                the parameters themselves

A strategy that replaces parameters binds groups and state anew by names. These it cannot: the
optimizer would pair them with other parameters, or step tensors with which nobody computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import StrategyRefused

_BOUND = ("param_groups", "state", "defaults")
_DEEPEST = 4


def check_keeps_no_tensors(
    optimizer: Optimizer, groups: list[list[str]], owned: Mapping[str, nn.Parameter]
) -> None:
    """Raise StrategyRefused if an optimizer that is to be bound anew keeps tensors elsewhere.

    Args:
        groups: for each of its groups, the names of its parameters.
        owned: the parameters that this rank owns, by name.
    """
    named = [
        (name, parameter)
        for group, names in zip(optimizer.param_groups, groups, strict=True)
        for name, parameter in zip(names, group["params"], strict=True)
    ]
    replaced = {id(old) for name, old in named if owned.get(name) is not old}
    # Those of torch have checks of their own: LBFGS keeps a list of its parameters.
    if not replaced or type(optimizer).__module__.startswith("torch.optim"):
        return
    shapes = [parameter.shape for _, parameter in named]
    for key, value in _attributes(optimizer):
        tensors = list(_tensors_in(value, optimizer, _DEEPEST))
        holds_copies = len(tensors) > 0 and [tensor.shape for tensor in tensors] == shapes
        if holds_copies or any(id(tensor) in replaced for tensor in tensors):
            what = "a tensor for each parameter" if holds_copies else "the parameters"
            raise StrategyRefused(
                f"{type(optimizer).__name__} keeps {what} in an attribute of its own, '{key}', "
                "since before run.prepare, and this strategy replaces the parameters by those "
                "that this rank owns. Let it read the parameters from self.param_groups in each "
                "step, and keep what belongs to one in self.state[parameter], made in the first "
                "step; or use ddp."
            )


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an optimizer that binding does not reach."""
    for key, value in vars(optimizer).items():
        if key not in _BOUND and not key.startswith("_optimizer_"):
            yield key, value


def _tensors_in(value: Any, owner: Optimizer, depth: int) -> Iterator[Tensor]:
    """Yield the tensors of a nest; of another optimizer, those that it does not share."""
    if isinstance(value, Tensor):
        yield value
    if depth == 0 or value is owner:
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, Optimizer):
        shared = {id(group) for group in owner.param_groups}
        groups = [group["params"] for group in value.param_groups if id(group) not in shared]
        value = [*groups, *(inner for _, inner in _attributes(value))]
    elif not isinstance(value, (list, tuple)):
        return
    for inner in value:
        yield from _tensors_in(inner, owner, depth - 1)
