"""Memory of gradients between their arrival and their sum: received here, or read from the memory
of a worker on this host.
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
from shoal.parameter_server.transport.connection import Header
from shoal.shm_backend.segment import AttachedSegment, attach


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
        self._worker_memory: dict[int, AttachedSegment] = {}

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
            ProtocolViolation: the payload does not fit the partition.
        """
        layout = self._layouts[header.partition]
        try:
            return self._gradient(worker, header, payload, layout)
        except (UsageError, KeyError, ValueError) as error:
            raise ProtocolViolation(
                f"the gradient of part {layout.number} cannot be read: {error}"
            ) from error

    def _gradient(
        self, worker: int, header: Header, payload: memoryview, layout: Partition
    ) -> Tensor:
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
