"""Fewer bytes for gradients on their way to whoever adds them up.

      gradient ──(+)──> encode ──> message ──> decode ──> gradient, roughly
                ^          │        fixed size
                └─ memory <┘        what the message left out waits here for the next step (top-k and one-bit)

    none      as it is
    bf16      2 bytes a number, 8 bits of precision                       half.py
    fp16      2 bytes a number, 11 bits of precision, one shift           half.py
    topk=f    (4 + its own) bytes for each of the f x count largest       topk.py
    onebit    1 bit a number, two means                                   onebit.py

None of them gives the numbers of one device, so none is ever on unless it was asked for.
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
"""The compressions that take no number."""


def parse(text: str) -> Compression | None:
    """The compression that `text` names: none, bf16, fp16, topk=FRACTION or onebit. None stands for
    none.

    Raises: ConfigError: another word, a value where there is none, or a fraction outside its range.
    """
    name, number = read(text)
    return TopK(number) if name == "topk" else PLAIN[name]
