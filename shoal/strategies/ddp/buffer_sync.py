"""Broadcast of the first rank's buffers, in models whose forward pass changes them."""

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
    """Gives every rank the first rank's buffers in each step, if the first step changed any.

    Each rank's forward pass changes buffers by its own samples: without this they drift apart.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self._module = module
        self._axis = axis
        self._before: Mapping[str, BufferVersion] = snapshot(module)
        self._is_first_step = True
        self._broadcasts = False

    def broadcast(self) -> None:
        """Take the first rank's buffers. To be called when a step begins. Collective."""
        if not self._broadcasts:
            return
        for buffer in mutable_buffers(self._module).values():
            self._axis.broadcast_tensor(buffer)

    def changed(self) -> bool:
        """Return if this rank's first step has changed a buffer; False after that step."""
        return self._is_first_step and any(changed_since(self._module, self._before).values())

    def record_change(self, on_any_rank: bool) -> None:
        """End a step in which `changed` was true on some rank, or on none.

        Only the first step counts.
        """
        if not self._is_first_step:
            return
        self._is_first_step = False
        self._broadcasts = on_any_rank
        self._before = {}
