"""Memory of one server: gradients between their arrival and their sum, and values that workers of
the same host read.

    gradients    received here, or read from the memory of a worker on this host

    slot 0       the values that the shard steps    read by workers in synchronous steps: the
                                                    values cannot change before every worker has
                                                    read them
    slot 1       worker 0's copy                    read in asynchronous steps: values may change at
    slot 2       worker 1's copy                    any time, so each worker has a copy

Each slot has addresses for the full model. Only the partitions that this server holds take memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.compression.base import Compression
from shoal.parameter_server import sparse_blocks
from shoal.parameter_server.codec import BLOCKS, SHARED, Op, as_bytes
from shoal.parameter_server.events import ProtocolViolation
from shoal.parameter_server.partitioning import Partition, offsets
from shoal.parameter_server.transport.connection import Header
from shoal.shm_backend.segment import Segment, SharedSegment, attach


class ReceiveBuffers:
    """Receive buffers of one server: one for each peer and partition.

    Args:
        parts: number -> partition, of all of the model.
        compression: of the gradients that workers push.
    """

    def __init__(self, parts: Mapping[int, Partition], compression: Compression | None) -> None:
        self._layouts = parts
        self._compression = compression
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._worker_memory: dict[int, Segment] = {}

    def buffer_for(self, peer: int, header: Header) -> memoryview | None:
        """Return the memory to receive a frame's payload into; None for new memory.

        A plain gradient goes to the buffer from which it is summed, so it is never copied.
        """
        if header.op not in (Op.PUSH, Op.REPLICATE):
            return None
        layout = self._layouts.get(header.partition)
        is_compressed = header.op == Op.PUSH and self._compression is not None
        if layout is None or is_compressed or header.flags or header.length != layout.size_bytes:
            # A payload of a wrong length is received and then refused, so that the peer gets the
            # reason.
            return None
        return as_bytes(self._buffer(peer, layout))

    def pushed(self, worker: int, header: Header, payload: memoryview) -> Tensor:
        """Return the gradient of a PUSH, flat, of the partition's length.

        Raises:
            ProtocolViolation, LookupError, ValueError: the payload does not fit the partition.
        """
        layout = self._layouts[header.partition]
        if header.flags & SHARED:
            # Two fields of 32 bits carry the offset in the worker's memory.
            offset_bytes = header.epoch << 32 | header.worker
            memory = self._worker_memory[worker]
            return memory.tensor(offset_bytes, layout.length, layout.dtype)
        if header.flags & BLOCKS:
            buffer = self._buffer(worker, layout)
            sparse_blocks.unpack(payload, buffer.zero_())
            return buffer
        compression = self._compression
        expected_bytes = (
            layout.size_bytes
            if compression is None
            else compression.size_bytes(layout.length, layout.dtype)
        )
        if header.length != expected_bytes:
            raise ProtocolViolation(
                f"a gradient of {header.length} bytes for part {layout.number}, which takes "
                f"{expected_bytes}"
            )
        if compression is None:
            return self._buffers[worker, layout.number]  # `buffer_for` has placed it there
        packed = torch.frombuffer(payload, dtype=torch.uint8)
        return compression.decode(packed, layout.length, layout.dtype)

    def update(self, primary: int, header: Header) -> Tensor:
        """Return the gradient of a REPLICATE, flat, of the partition's length.

        Raises:
            ProtocolViolation: the payload does not fit the partition.
        """
        layout = self._layouts.get(header.partition)
        if layout is None or header.length != layout.size_bytes:
            raise ProtocolViolation(
                f"an update of {header.length} bytes for part {header.partition}, which takes "
                "another number"
            )
        return self._buffers[primary, header.partition]

    def attach_worker_memory(self, worker: int, description: Mapping[str, Any]) -> bool:
        """Map the memory of a worker's gradients. Return whether it is on this host."""
        segment = attach(description)
        if segment is not None:
            self._worker_memory[worker] = segment
        return segment is not None

    def forget(self, partition: int) -> None:
        """Free the buffers of a partition."""
        self._buffers = {
            key: buffer for key, buffer in self._buffers.items() if key[1] != partition
        }

    def _buffer(self, peer: int, layout: Partition) -> Tensor:
        key = peer, layout.number
        if key not in self._buffers:
            self._buffers[key] = torch.empty(layout.length, dtype=layout.dtype)
        return self._buffers[key]


def slot_of(worker: int, staleness: int | None) -> int:
    """Return the slot that a worker reads."""
    return 0 if staleness == 0 else 1 + worker


def read_offsets(parts: Sequence[Partition], worker: int, staleness: int | None) -> list[int]:
    """Return where a worker reads each partition in a server's memory, in bytes."""
    partition_offsets, slot_bytes = offsets(parts)
    start = slot_of(worker, staleness) * slot_bytes
    return [start + partition_offsets[part.number] for part in parts]


class SharedValues:
    """Values of one server, which workers of the same host read.

    Attributes:
        memory: its description lets workers of this host map it.
    """

    def __init__(self, parts: Sequence[Partition], workers: int, staleness: int | None) -> None:
        self._layouts = {part.number: part for part in parts}
        self._offsets, self._slot_bytes = offsets(parts)
        self._staleness = staleness
        self._slots = 1 + slot_of(workers - 1, staleness)
        self.memory = SharedSegment(self._slots * self._slot_bytes)

    def values(self, part: Partition) -> Tensor:
        """Return the memory in which a partition's values are stepped: flat, of its dtype."""
        return self.memory.tensor(self._offsets[part.number], part.length, part.dtype)

    def copy(self, worker: int, partition: int, values: Tensor) -> Tensor:
        """Copy a partition's values to where this worker reads them before its next request."""
        if self._slots == 1:
            return values
        layout = self._layouts[partition]
        start = slot_of(worker, self._staleness) * self._slot_bytes + self._offsets[partition]
        return self.memory.tensor(start, layout.length, layout.dtype).copy_(values)

    def discard(self, part: Partition) -> None:
        """Return the memory of a partition to the operating system."""
        for slot in range(self._slots):
            start = slot * self._slot_bytes + self._offsets[part.number]
            self.memory.release_pages(start, part.size_bytes)
