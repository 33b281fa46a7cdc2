"""`group["params"]` of optimizers under a pipeline: a script sees the parameters of all stages.

norm = sum(p.grad.norm() ** 2 for p in group["params"]) ** 0.5     an error: gradients elsewhere
for p in group["params"]: p.clamp_(-1, 1)                          allowed: each rank its own
sum(p.numel() for p in group["params"])                            that of the whole model

The optimizer steps those of this rank's stage, and sees these alone. A script that saw no others
would take the norm of one stage for that of the model, and every rank another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.run.guards.call_site import is_in_step
from shoal.run.guards.guarded_models import GuardedModels, Removable

_TORCH = Path(torch.__file__).parent
_INSIDERS = (f"{_TORCH / 'optim'}/", f"{_TORCH / 'amp'}/", f"{Path(__file__).parents[2]}/", "<")
_READS = (
    *("__iter__", "__len__", "__getitem__", "__contains__", "__reversed__", "__add__", "__eq__"),
    *("__mul__", "__repr__", "copy", "index", "count"),
)


class StageGroup(list[Any]):
    """Parameters of one group that this rank steps; a script sees those of all stages.

    Args: own: of this rank. whole: of all stages, absent ones where they are on other ranks.
    """

    def __init__(
        self, own: Sequence[nn.Parameter], whole: Sequence[nn.Parameter], optimizer: Optimizer
    ) -> None:
        super().__init__(own)
        self.whole = [*whole]
        self.optimizer = optimizer

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *_seen(self, sys._getframe(1))]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list.copy(self),)


def _seen(group: StageGroup, frame: Any) -> list[Any]:
    """Return what a caller sees: all stages, or this rank's own where torch or Shoal asks."""
    inside = frame.f_code.co_filename.startswith(_INSIDERS) or is_in_step(frame, group.optimizer)
    return list.copy(group) if inside else group.whole


def _reading(name: str) -> Any:
    inherited = getattr(list, name)

    def method(self: StageGroup, *args: Any) -> Any:
        return inherited(_seen(self, sys._getframe(1)), *args)

    method.__name__ = name
    return method


for _name in _READS:
    setattr(StageGroup, _name, _reading(_name))


def guard_stage_groups(guarded: GuardedModels) -> Iterator[Removable]:
    """Show scripts the parameters of all stages in the optimizers' groups; yield handles."""
    if not guarded.local_model.is_partial:
        return
    for optimizer, names in zip(guarded.optimizers, guarded.group_names, strict=True):
        for group, members in zip(optimizer.param_groups, names, strict=True):
            yield _Shown(guarded, optimizer, group, members)


class _Shown:
    """A group that shows all stages until this is removed."""

    def __init__(
        self,
        guarded: GuardedModels,
        optimizer: Optimizer,
        group: dict[str, Any],
        names: Sequence[str],
    ) -> None:
        self._group = group
        owned = guarded.local_model.trainable_params
        found = (owned.get(name, guarded.parameters.get(name)) for name in names)
        whole = {id(p): p for p in found if p is not None and p.requires_grad}
        self._shown = StageGroup(group["params"], [*whole.values()], optimizer)
        group["params"] = self._shown

    def remove(self) -> None:
        """Give the group a plain list again."""
        if self._group["params"] is self._shown:
            self._group["params"] = list.copy(self._shown)
