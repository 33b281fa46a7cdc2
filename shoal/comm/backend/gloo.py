"""Gloo, as it stands beside shared memory, and as torch asks it for buffers.

    fully_shard ── allocate_tensor ──> a tensor in the room, which collectives of the group need not copy

torch asks the backend of a device for buffers, and for the CPU that is Gloo: so the answer is given here. `fully_shard`
asks where `set_allocate_memory_from_process_group_for_comm(True)` was called. DistributedDataParallel asks too, but in
C++, which does not hear what is said in Python.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.backend.direct import DIRECT_BYTES
from shoal.comm.backend.room import Room

Base: Any = dist.ProcessGroupGloo


class GlooWithRoom(Base):
    """A Gloo backend whose buffers lie in shared memory.

    Attributes:
        room: where; None where there is none.
    """

    room: Room | None = None

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether it is worth asking."""
        return self.room is not None and torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor with anything in it: in the room where that helps and it fits, else anywhere."""
        if self.room is not None and size * dtype.itemsize >= DIRECT_BYTES:
            found = self.room.tensor(size, dtype)
            if found is not None:
                return found
        return torch.empty(size, dtype=dtype, device=device)
