"""Means over ranks of compressed gradients: the reduce functions of `ddp,compress=...`.

    bf16, fp16      each rank averages one chunk; values are rounded on both ways       halves.py
    topk, onebit    each rank gets the messages of all ranks, and averages them         gathered.py
    powersgd=R      a matrix is a product of two thin ones; their means are all-reduced powersgd.py

Messages are those of `shoal.comm.compression`, which the parameter server uses too. No compression
gives the numbers of one device, so all are off by default."""

from __future__ import annotations

from shoal.comm import compression
from shoal.comm.compression.reducers.base import BucketEntry, CompressedReducer, uncompressed_bytes
from shoal.comm.compression.reducers.gathered import AllGatherReducer
from shoal.comm.compression.reducers.halves import HalfPrecisionReducer
from shoal.comm.compression.reducers.powersgd import PowerSgd
from shoal.comm.compression_spec import read

__all__ = [
    "AllGatherReducer",
    "BucketEntry",
    "CompressedReducer",
    "HalfPrecisionReducer",
    "PowerSgd",
    "parse",
    "uncompressed_bytes",
]


def parse(text: str) -> CompressedReducer | None:
    """Make the reducer for `text`: none, bf16, fp16, topk=FRACTION, onebit or powersgd=RANK.

    Returns: None for "none".

    Raises: ConfigError: an unknown name, or a wrong value.
    """
    name, number = read(text, powersgd=True)
    if name == "powersgd":
        return PowerSgd(int(number))
    codec = compression.parse(text)
    if codec is None:
        return None
    return AllGatherReducer(codec) if codec.keeps_error else HalfPrecisionReducer(codec)
