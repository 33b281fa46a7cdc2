"""Gradient compression: messages of fewer bytes to a parameter server or to other ranks.

      gradient ──(+)──> encode ──> message ──> decode ──> approximate gradient
                ^          │        of fixed size
                └─ memory <┘        the residual, added in the next step (top-k and one-bit)

    none      uncompressed
    bf16      2 bytes for each element, 8 bits of precision                      half.py
    fp16      2 bytes for each element, 11 bits of precision, one shift          half.py
    topk=f    4 bytes and the value for each of the f x count largest            topk.py
    onebit    1 bit for each element, two means                                  onebit.py

No compression gives the numbers of one device, so all are off by default.
"""

from __future__ import annotations

from shoal.comm.compression.base import Compression
from shoal.comm.compression.half import Bf16, Fp16
from shoal.comm.compression.onebit import OneBit
from shoal.comm.compression.topk import TopK
from shoal.comm.compression_spec import read

__all__ = ["Bf16", "Compression", "Fp16", "OneBit", "TopK", "parse"]

PLAIN: dict[str, Compression | None] = {
    "none": None,
    "bf16": Bf16(),
    "fp16": Fp16(),
    "onebit": OneBit(),
}
"""The compressions without a parameter."""


def parse(text: str) -> Compression | None:
    """Make the compression for `text`: none, bf16, fp16, topk=FRACTION or onebit.

    Returns: None for "none".

    Raises: ConfigError: an unknown name, a value for a compression that takes none, or a fraction
        outside its range.
    """
    name, number = read(text)
    return TopK(number) if name == "topk" else PLAIN[name]
