"""The header before every payload: fixed fields, little-endian, 44 bytes.

    0      4         6    7       8       12       16          20     28       36         44
    │magic │ version │ op │ flags │ epoch │ worker │ partition │ step │ length │ sequence │ payload
    │ 4s   │ u16     │ u8 │ u8    │ u32   │ u32    │ u32       │ u64  │ u64    │ u64      │

`codec.py` says what `op` and `flags` mean.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shoal.errors import WireError

MAGIC = b"SHPS"
VERSION = 4
_LAYOUT = struct.Struct("<4sHBBIIIQQQ")
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


def pack(header: Header, sequence: int) -> bytes:
    """Pack a header into 44 bytes; `sequence` counts the frames of one direction from 0."""
    op, length, worker, step, part, epoch, flags = header
    return _LAYOUT.pack(MAGIC, VERSION, op, flags, epoch, worker, part, step, length, sequence)


def unpack(packed: bytes | bytearray | memoryview) -> tuple[Header, int]:
    """Return the header in 44 bytes, and its sequence number.

    Raises:
        WireError: there are not 44 bytes, or they are no frame of this version of Shoal.
    """
    if len(packed) != HEADER_BYTES:
        raise WireError(f"a frame's header has {HEADER_BYTES} bytes; there are {len(packed)}")
    magic, version, op, flags, epoch, worker, part, step, length, sequence = _LAYOUT.unpack(packed)
    if magic != MAGIC:
        raise WireError(
            f"a frame begins with {MAGIC!r}; this one begins with {magic!r}. The peer is not "
            "Shoal's"
        )
    if version != VERSION:
        raise WireError(
            f"the peer speaks version {version} of the wire, this end {VERSION}. Run one Shoal on "
            "both"
        )
    return Header(op, length, worker, step, part, epoch, flags), sequence
