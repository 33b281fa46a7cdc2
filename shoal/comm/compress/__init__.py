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

from shoal.comm.compress.base import Compression
from shoal.comm.compress.half import Bf16, Fp16
from shoal.comm.compress.onebit import OneBit
from shoal.comm.compress.topk import TopK
from shoal.errors import ConfigError, did_you_mean

__all__ = ["Bf16", "Compression", "Fp16", "OneBit", "TopK", "parse"]

PLAIN: dict[str, Compression | None] = {"none": None, "bf16": Bf16(), "fp16": Fp16(), "onebit": OneBit()}
"""The compressions that take no value."""
LARGEST_FRACTION = 0.5
"""Above this fraction top-k sends more than a gradient of float32 has."""


def parse(text: str, others: tuple[str, ...] = ()) -> Compression | None:
    """The compression that `text` names: none, bf16, fp16, topk=FRACTION or onebit. None stands for none.

    Args: others: what the caller knows besides, to be named where `text` is not known.

    Raises: ConfigError: another word, a value where there is none, or a fraction outside its range.
    """
    name, equals, value = text.partition("=")
    if name == "topk":
        return TopK(_fraction(text, value))
    if name not in PLAIN:
        hint = did_you_mean(name.lower(), [*PLAIN, "topk", *others])
        raise ConfigError([f"compression '{text}' is not known; {hint}"])
    if equals:
        raise ConfigError([f"compression '{text}': {name} takes no value; write '{name}'"])
    return PLAIN[name]


def _fraction(text: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        problem = "topk needs the fraction of the numbers that is sent, as in topk=0.01"
        raise ConfigError([f"compression '{text}': {problem}"]) from None
    if not 0 < fraction <= LARGEST_FRACTION:
        problem = f"the fraction must be above 0 and at most {LARGEST_FRACTION}"
        why = "an index of 4 bytes goes with each number, so more would be larger than the gradient"
        raise ConfigError([f"compression '{text}': {problem}; {why}"])
    return fraction
