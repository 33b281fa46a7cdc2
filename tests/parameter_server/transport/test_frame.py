from __future__ import annotations

import pytest

from shoal.errors import WireError
from shoal.parameter_server.transport.frame import HEADER_BYTES, VERSION, Header, pack, unpack

FULL = Header(
    op=255,
    length=2**64 - 1,
    worker=2**32 - 1,
    step=2**64 - 2,
    partition=2**32 - 2,
    epoch=2**32 - 3,
    flags=254,
)


@pytest.mark.parametrize("header", [Header(op=0), FULL])
def test_a_header_comes_back_as_it_was_packed(header):
    assert unpack(pack(header, 2**64 - 5)) == (header, 2**64 - 5)


def test_the_fields_are_little_endian_and_placed_as_in_the_drawing():
    header = Header(op=1, length=7, worker=4, step=6, partition=5, epoch=3, flags=2)
    fields = [(VERSION, 2), (1, 1), (2, 1), (3, 4), (4, 4), (5, 4), (6, 8), (7, 8), (8, 8)]
    assert pack(header, 8) == b"SHPS" + b"".join(
        value.to_bytes(size, "little") for value, size in fields
    )


def test_bytes_that_are_no_frame_are_refused():
    packed = pack(FULL, 0)
    with pytest.raises(WireError, match="begins with b'GET '"):
        unpack(b"GET " + packed[4:])
    with pytest.raises(WireError, match=f"version {VERSION + 1} of the wire, this end {VERSION}"):
        unpack(packed[:4] + (VERSION + 1).to_bytes(2, "little") + packed[6:])
    with pytest.raises(WireError, match=f"has {HEADER_BYTES} bytes; there are 43"):
        unpack(packed[:-1])
