"""Buffers that a forward pass may change, and whether it has: in place, to another tensor, or to one more than before.

BatchNorm's are left out: training never reads its running statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.torch_private.module_state import NormBase
from shoal.torch_private.tensor_state import version


class Held(NamedTuple):
    """A buffer as it was at some time. It is held, for the id of one that is gone may become another's."""

    buffer: Tensor
    version: int


def changeable(module: nn.Module) -> dict[str, Tensor]:
    """Buffers by name, in the order of their names; one with two names is there twice."""
    owners = [(name, owner) for name, owner in module.named_modules() if not isinstance(owner, NormBase)]
    found = {f"{name}.{key}": b for name, owner in owners for key, b in owner.named_buffers(recurse=False)}
    return dict(sorted(found.items()))


def held(module: nn.Module) -> dict[str, Held]:
    """What `changed` is to compare with later."""
    return {name: Held(buffer, version(buffer)) for name, buffer in changeable(module).items()}


def changed(module: nn.Module, before: Mapping[str, Held]) -> dict[str, bool]:
    """For each buffer that there is now whether it is another, or holds other numbers, than in `before`."""
    found = {}
    for name, buffer in changeable(module).items():
        known = before.get(name)
        found[name] = known is None or known.buffer is not buffer or known.version != version(buffer)
    return found


class SharedBuffers:
    """The first rank's in every step, where ranks change theirs, each by its own samples; the first step looks."""

    def __init__(self, module: nn.Module, data: Axis) -> None:
        self.module, self.data = module, data
        self.before, self.looks, self.shares = held(module), True, False

    def share(self) -> None:
        """All ranks take the first one's. To be called when a step begins. Collective."""
        for buffer in changeable(self.module).values() if self.shares else ():
            self.data.broadcast_tensor(buffer)

    def changed(self) -> bool:
        """Whether this rank's first step has changed any; False after that step."""
        return self.looks and any(changed(self.module, self.before).values())

    def saw(self, any_rank: bool) -> None:
        """After each step: whether `changed` was true on any rank."""
        if self.looks:
            self.looks, self.shares, self.before = False, any_rank, {}
