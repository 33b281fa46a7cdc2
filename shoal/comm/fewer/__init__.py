"""Means over ranks of gradients that are sent in fewer bytes: what `ddp,compress=...` reduces its buckets by.

    bf16, fp16      every rank adds up one part of the numbers, rounded on the way there and back     halves.py
    topk, onebit    every rank gets every rank's message, and adds them up                            gathered.py
    powersgd=R      matrices as products of two thin ones, whose means are two small all-reduces      powersgd.py

Messages are those of `shoal.comm.compress`, which the parameter server has too. None of this gives the numbers of one
device, so none is ever on unless it was asked for.
"""

from __future__ import annotations

from shoal.comm import compress
from shoal.comm.compression_names import read
from shoal.comm.fewer.base import Member, Reduction, plain_bytes
from shoal.comm.fewer.gathered import Gathered
from shoal.comm.fewer.halves import Halves
from shoal.comm.fewer.powersgd import PowerSgd

__all__ = ["Gathered", "Halves", "Member", "PowerSgd", "Reduction", "parse", "plain_bytes"]


def parse(text: str) -> Reduction | None:
    """The reduction that `text` names: none, bf16, fp16, topk=FRACTION, onebit or powersgd=RANK. None stands for none.

    Raises: ConfigError: another word, or a value that it does not take.
    """
    name, number = read(text, powersgd=True)
    if name == "powersgd":
        return PowerSgd(int(number))
    compression = compress.parse(text)
    if compression is None:
        return None
    return Gathered(compression) if compression.keeps_error else Halves(compression)
