"""Versions of buffers: which ones a forward pass has changed in place, replaced, or added.

Ranks that change buffers by their own samples take the first rank's (`BufferSync`).

Running statistics of norms are left out, for training never reads them, unless who asks wants to
know of those of InstanceNorm too.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.platform.torch_private.module_state import NormBase
from shoal.platform.torch_private.tensor_state import version

BufferVersion = tuple[Tensor, int]
"""A buffer and its version at one moment. It keeps the tensor alive, for the id of a freed one may
become another tensor's.
"""


def mutable_buffers(module: nn.Module, norms: type[nn.Module] = NormBase) -> dict[str, Tensor]:
    """Return buffers by name, sorted by name. A buffer with two names is there twice.

    The order is the same on all ranks, which broadcast them one after the other.

    Args: norms: classes of layers whose buffers are left out.
    """
    buffers = {}
    for name, owner in module.named_modules():
        if isinstance(owner, norms):
            continue
        for key, buffer in owner.named_buffers(recurse=False):
            buffers[f"{name}.{key}"] = buffer
    return dict(sorted(buffers.items()))


def snapshot(module: nn.Module, norms: type[nn.Module] = NormBase) -> dict[str, BufferVersion]:
    """Return the versions of all buffers, to be given to `changed_since` later."""
    buffers = mutable_buffers(module, norms)
    return {name: (buffer, version(buffer)) for name, buffer in buffers.items()}


def changed_since(
    module: nn.Module,
    before: Mapping[str, BufferVersion],
    norms: type[nn.Module] = NormBase,
) -> dict[str, bool]:
    """Return by name if a buffer is another tensor, or has other values, than in `before`."""
    changes = {}
    for name, buffer in mutable_buffers(module, norms).items():
        known, known_version = before.get(name, (None, 0))
        changes[name] = known is not buffer or known_version != version(buffer)
    return changes


class BufferSync:
    """Broadcasts the first rank's buffers in each step, if the first step changed any.

    Each rank's forward pass changes buffers by its own samples. Without a broadcast, ranks would
    have different buffers.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self._module = module
        self._axis = axis
        self._before: Mapping[str, BufferVersion] = snapshot(module)
        self._is_first_step = True
        self._broadcasts = False

    def broadcast(self) -> None:
        """Receive the first rank's buffers. Called at the beginning of a step. Collective."""
        if not self._broadcasts:
            return
        for buffer in mutable_buffers(self._module).values():
            self._axis.broadcast_tensor(buffer)

    def changed(self) -> bool:
        """Return True if this rank's first step has changed a buffer; False in later steps."""
        return self._is_first_step and any(changed_since(self._module, self._before).values())

    def record_change(self, on_any_rank: bool) -> None:
        """Record at the end of a step if `changed` was True on any rank.

        Only the first step counts: later steps are not compared, which would cost time.
        """
        if not self._is_first_step:
            return
        self._is_first_step = False
        self._broadcasts = on_any_rank
        self._before = {}
