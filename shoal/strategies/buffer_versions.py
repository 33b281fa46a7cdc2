"""Versions of buffers: which ones a forward pass has changed in place, replaced, or added.

BatchNorm's buffers are left out: training never reads its running statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from shoal.platform.torch_private.module_state import NormBase
from shoal.platform.torch_private.tensor_state import version


class BufferVersion(NamedTuple):
    """A buffer at one moment.

    It keeps the tensor alive, for the id of a freed one may become another tensor's.
    """

    buffer: Tensor
    version: int


def mutable_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return buffers by name, sorted by name. A buffer with two names is there twice.

    The order is the same on all ranks, which broadcast them one after the other.
    """
    buffers = {}
    for name, owner in module.named_modules():
        if isinstance(owner, NormBase):
            continue
        for key, buffer in owner.named_buffers(recurse=False):
            buffers[f"{name}.{key}"] = buffer
    return dict(sorted(buffers.items()))


def snapshot(module: nn.Module) -> dict[str, BufferVersion]:
    """Return the versions of all buffers, to be given to `changed_since` later."""
    buffers = mutable_buffers(module)
    return {name: BufferVersion(buffer, version(buffer)) for name, buffer in buffers.items()}


def changed_since(module: nn.Module, before: Mapping[str, BufferVersion]) -> dict[str, bool]:
    """Return by name if a buffer is another tensor, or has other values, than in `before`."""
    changes = {}
    for name, buffer in mutable_buffers(module).items():
        known = before.get(name)
        is_same = known is not None and known.buffer is buffer and known.version == version(buffer)
        changes[name] = not is_same
    return changes
