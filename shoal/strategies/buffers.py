"""Buffers that a forward pass may change, and whether it has: in place, to another tensor, or to one more than before.

BatchNorm's are left out: training never reads its running statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

_BatchNorm = torch.nn.modules.batchnorm._NormBase


class Held(NamedTuple):
    """A buffer as it was at some time. It is held, for the id of one that is gone may become another's."""

    buffer: Tensor
    version: int


def changeable(module: nn.Module) -> dict[str, Tensor]:
    """Buffers by name, in the order of their names; one with two names is there twice."""
    owners = [(name, owner) for name, owner in module.named_modules() if not isinstance(owner, _BatchNorm)]
    found = {f"{name}.{key}": b for name, owner in owners for key, b in owner.named_buffers(recurse=False)}
    return dict(sorted(found.items()))


def held(module: nn.Module) -> dict[str, Held]:
    """What `changed` is to compare with later."""
    return {name: Held(buffer, buffer._version) for name, buffer in changeable(module).items()}


def changed(module: nn.Module, before: Mapping[str, Held]) -> dict[str, bool]:
    """For each buffer that there is now whether it is another, or holds other numbers, than in `before`."""
    found = {}
    for name, buffer in changeable(module).items():
        known = before.get(name)
        found[name] = known is None or known.buffer is not buffer or known.version != buffer._version
    return found
