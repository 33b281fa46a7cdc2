"""Gradient compression: messages of fewer bytes to a parameter server or to other ranks.

    none        uncompressed
    bf16        2 bytes for each element, 8 bits of precision                      half.py
    fp16        2 bytes for each element, 11 bits of precision, one shift          half.py
    topk=f      4 bytes and the value for each of the f x count largest            topk.py
    onebit      1 bit for each element, two means                                  onebit.py
    powersgd=r  a matrix is a product of two thin ones; between ranks alone        powersgd.py

`parse` makes what encodes and decodes one gradient, and `parse_reducer` means over ranks: of bf16
and fp16 each rank averages one chunk; of topk and onebit each gets all messages. What topk, onebit
and powersgd leave out is added in the next step (error_feedback.py). No compression gives the
numbers of one device, so all are off by default.
"""

from __future__ import annotations

from shoal.comm.compression.base import Compression
from shoal.comm.compression.error_feedback import AllGatherReducer, CompressedReducer
from shoal.comm.compression.half import Bf16, Fp16, HalfPrecisionReducer
from shoal.comm.compression.onebit import OneBit
from shoal.comm.compression.powersgd import PowerSgd
from shoal.comm.compression.topk import TopK
from shoal.comm.compression_spec import read

CODECS: dict[str, Compression] = {"bf16": Bf16(), "fp16": Fp16(), "onebit": OneBit()}
"""The compressions without a parameter."""


def parse(text: str) -> Compression | None:
    """Make the compression for `text`: none, bf16, fp16, topk=FRACTION or onebit.

    Returns: None for "none".

    Raises: ConfigError: an unknown name, a value for a compression that takes none, or a fraction
        outside its range.
    """
    name, number = read(text)
    return TopK(number) if name == "topk" else CODECS.get(name)


def parse_reducer(text: str) -> CompressedReducer | None:
    """Make the reducer for `text`: as `parse`, or powersgd=RANK."""
    name, number = read(text, powersgd=True)
    if name == "powersgd":
        return PowerSgd(int(number))
    codec = parse(text)
    if codec is None:
        return None
    return AllGatherReducer(codec) if codec.keeps_error else HalfPrecisionReducer(codec)
