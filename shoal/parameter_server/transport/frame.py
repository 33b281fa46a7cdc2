"""The header before every payload: fixed fields, little-endian, 32 bytes.

    0    1       2          4       8        12          16     24       32
    │ op │ flags │ reserved │ epoch │ worker │ partition │ step │ length │ payload
    │ u8 │ u8    │ u16      │ u32   │ u32    │ u32       │ u64  │ u64    │

`codec.py` says what `op` and `flags` mean.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_LAYOUT = struct.Struct("<BBxxIIIQQ")
HEADER_BYTES = _LAYOUT.size


class Header(NamedTuple):
    """Fields of a frame's header. A value out of range is a `struct.error` in `pack`.

    Some operations carry other values in fields that they do not need; `codec.py` says which.

    Attributes:
        op: the operation, 0 to 255.
        length: bytes of payload that follow, below 2**64.
        worker: number of the worker that sends or receives it, below 2**32.
        step: the step, or the clock, that it belongs to, below 2**64.
        partition: number of the partition, below 2**32.
        epoch: of the primary in the sender's view, below 2**32.
        flags: eight bits.
    """

    op: int
    length: int = 0
    worker: int = 0
    step: int = 0
    partition: int = 0
    epoch: int = 0
    flags: int = 0


def pack(header: Header) -> bytes:
    """Pack a header into 32 bytes."""
    op, length, worker, step, part, epoch, flags = header
    return _LAYOUT.pack(op, flags, epoch, worker, part, step, length)


def unpack(packed: bytes | bytearray | memoryview) -> Header:
    """Return the header in 32 bytes."""
    op, flags, epoch, worker, part, step, length = _LAYOUT.unpack(packed)
    return Header(op, length, worker, step, part, epoch, flags)
