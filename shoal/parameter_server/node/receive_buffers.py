"""Where what is pushed lies until it is summed: received here, or read from the memory of
whoever has pushed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.comm.compression import Compression
from shoal.errors import UsageError
from shoal.parameter_server import sparse_blocks
from shoal.parameter_server.codec import BLOCKS, SHARED, Op, as_bytes
from shoal.parameter_server.events import ProtocolViolation
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.transport.frame import Header
from shoal.shm_backend.segment import AttachedSegment, attach


class ReceiveBuffers:
    """One server's.

    Args:
        parts: of the model, by number.
        compression: of what workers push.
    """

    def __init__(self, parts: Mapping[int, Partition], compression: Compression | None) -> None:
        self.parts, self.compression = parts, compression
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._lent: dict[int, AttachedSegment] = {}

    def place(self, number: int, header: Header) -> memoryview | None:
        """Where a payload goes: a gradient to the memory that it is summed from."""
        if header.op not in (Op.PUSH, Op.REPLICATE):
            return None
        part = self.parts.get(header.partition)
        packed = self.compression if header.op == Op.PUSH else None
        if part is None or packed is not None or header.flags or header.length != part.size_bytes:
            # what does not fit is refused when all of it has come, so that the peer hears why
            return None
        return as_bytes(self._buffer(number, part))

    def pushed(self, worker: int, header: Header, payload: memoryview) -> Tensor:
        """A worker's gradient: where it lies, or unpacked. Raises Refused."""
        part = self.parts[header.partition]
        try:
            if header.flags & SHARED:
                at_bytes = header.epoch << 32 | header.worker
                return self._lent[worker].tensor(at_bytes, part.length, part.dtype)
            if header.flags & BLOCKS:
                buffer = self._buffer(worker, part)
                sparse_blocks.unpack(payload, buffer.zero_())
                return buffer
            packed = self.compression
            expected = (
                part.size_bytes if packed is None else packed.size_bytes(part.length, part.dtype)
            )
            if header.length != expected:
                raise ProtocolViolation(
                    f"a gradient of {header.length} bytes for part {part.number}, which takes "
                    f"{expected}"
                )
            if packed is None:
                return self._buffers[worker, part.number]
            return packed.decode(
                torch.frombuffer(payload, dtype=torch.uint8), part.length, part.dtype
            )
        except (UsageError, KeyError, ValueError) as error:
            raise ProtocolViolation(
                f"the gradient of part {part.number} cannot be read: {error}"
            ) from error

    def update(self, number: int, header: Header) -> Tensor:
        """What a primary has applied. Raises Refused."""
        part = self.parts.get(header.partition)
        if part is None or header.length != part.size_bytes:
            raise ProtocolViolation(
                f"an update of {header.length} bytes for part {header.partition}, which takes "
                "another number"
            )
        return self._buffers[number, header.partition]

    def attach_worker_memory(self, worker: int, description: Mapping[str, Any]) -> bool:
        """A worker of this machine lends the memory of its gradients; whether it can be read."""
        found = attach(description)
        if found is not None:
            self._lent[worker] = found
        return found is not None

    def forget(self, part: int) -> None:
        """Free what was received of a part."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[1] != part}

    def _buffer(self, number: int, part: Partition) -> Tensor:
        key = number, part.number
        if key not in self._buffers:
            self._buffers[key] = torch.empty(part.length, dtype=part.dtype)
        return self._buffers[key]
