"""Broadcast of the first rank's buffers, in models whose forward pass changes buffers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal.comm.axis import Axis
from shoal.strategies.buffer_versions import (
    BufferVersion,
    changed_since,
    mutable_buffers,
    snapshot,
)


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
