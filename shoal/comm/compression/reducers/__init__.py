"""Means over ranks of gradients that are sent in fewer bytes: what `ddp,compress=...` reduces its
buckets by.

    bf16, fp16      every rank adds up one part of the numbers, rounded on the way there and back     halves.py
    topk, onebit    every rank gets every rank's message, and adds them up                            gathered.py
    powersgd=R      matrices as products of two thin ones, whose means are two small all-reduces      powersgd.py

Messages are those of `shoal.comm.compression`, which the parameter server has too. None of this
gives the numbers of one device, so none is ever on unless it was asked for."""

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
    """The reduction that `text` names: none, bf16, fp16, topk=FRACTION, onebit or powersgd=RANK.
    None stands for none.

    Raises: ConfigError: another word, or a value that it does not take.
    """
    name, number = read(text, powersgd=True)
    if name == "powersgd":
        return PowerSgd(int(number))
    codec = compression.parse(text)
    if codec is None:
        return None
    return AllGatherReducer(codec) if codec.keeps_error else HalfPrecisionReducer(codec)
