"""The bytes around the numbers of one tensor, so that torch.load reads them: a zip of four records.

    t/version  t/byteorder  t/data.pkl  t/data/0              list of records
    ──────────────── head ─────────────│ numbers, row by row │───── tail ─────

torch.save writes such a zip too, and does not tell where the numbers are: a reader who knows that
needs no unpickler. The digest of the file is in the manifest, so the zip's own sum of the numbers
stays 0, as after `torch.serialization.set_crc32_options(False)`: torch.load does not compare it.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shoal.platform.torch_private.checkpoint_files import REBUILD_TENSOR

ALIGNMENT = 64  # of the numbers in the file
ZIP64 = 0xFFFFFFFF  # stands for a size that follows in 64 bits
VERSION = 45  # of the zip format, which has sizes of 64 bits
DATE = 0x21  # 1 January 1980


def around(
    dtype: torch.dtype, shape: Sequence[int], size_bytes: int, start_bytes: int
) -> tuple[bytes, bytes]:
    """Return what stands before and after the `size_bytes` of a tensor's numbers.

    Args: start_bytes: where the head will lie in its file; it ends at a multiple of ALIGNMENT.
    """
    texts = {
        "t/version": b"3\n",
        "t/byteorder": sys.byteorder.encode(),
        "t/data.pkl": _description(dtype, tuple(shape), size_bytes),
    }
    head, records = bytearray(), []
    for name, text in texts.items():
        records.append(_ZipRecord(name.encode(), len(text), zlib.crc32(text), len(head)))
        head += records[-1].local_header(0) + text
    numbers = _ZipRecord(b"t/data/0", size_bytes, 0, len(head))
    end = start_bytes + len(head) + len(numbers.local_header(0))
    head += numbers.local_header(-end % ALIGNMENT)
    return bytes(head), _tail([*records, numbers], len(head) + size_bytes)


@dataclass(frozen=True)
class _ZipRecord:
    """A file of a zip that is stored as it is."""

    name: bytes
    size_bytes: int
    crc32: int
    start_bytes: int

    def local_header(self, padding: int) -> bytes:
        """Return what stands before the record. Args: padding: bytes that mean nothing."""
        extra = struct.pack("<HHQQ", 1, 16, self.size_bytes, self.size_bytes)
        if padding:
            padding += ALIGNMENT * (padding < 4)  # a field has a head of 4 bytes
            extra += struct.pack("<HH", 0x4246, padding - 4) + bytes(padding - 4)
        fields = (VERSION, 0, 0, 0, DATE, self.crc32, ZIP64, ZIP64, len(self.name), len(extra))
        return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *fields) + self.name + extra

    def listed(self) -> bytes:
        """Return the entry of the record in the list at the end."""
        extra = struct.pack("<HHQQQ", 1, 24, self.size_bytes, self.size_bytes, self.start_bytes)
        sizes = (self.crc32, ZIP64, ZIP64, len(self.name), len(extra))
        fields = (VERSION, VERSION, 0, 0, 0, DATE, *sizes, 0, 0, 0, 0, ZIP64)
        return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *fields) + self.name + extra


def _tail(records: Sequence[_ZipRecord], start_bytes: int) -> bytes:
    listed, count = b"".join(record.listed() for record in records), len(records)
    end = struct.pack(
        "<4sQHHIIQQQQ",
        *(b"PK\6\6", 44, VERSION, VERSION, 0, 0, count, count, len(listed), start_bytes),
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start_bytes + len(listed), 1)
    last = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(listed), ZIP64, 0)
    return listed + end + locator + last


class _Storage:
    """The memory of a tensor, in its description."""


class _Described:
    """A tensor, in its description."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return REBUILD_TENSOR, self.arguments


class _Pickler(pickle.Pickler):
    """Writes the call that makes a tensor of `size_bytes`."""

    def __init__(self, file: io.BytesIO, size_bytes: int) -> None:
        super().__init__(file, protocol=2)
        self._size_bytes = size_bytes

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return "storage", torch.UntypedStorage, "0", "cpu", self._size_bytes


@lru_cache(maxsize=1 << 12)
def _description(dtype: torch.dtype, shape: tuple[int, ...], size_bytes: int) -> bytes:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    storage, requires_grad = _Storage(), False
    arguments: tuple[Any, ...]
    arguments = (storage, 0, shape, tuple(strides[::-1]), requires_grad, OrderedDict(), dtype)
    file = io.BytesIO()
    _Pickler(file, size_bytes).dump(_Described(arguments))
    return file.getvalue()
