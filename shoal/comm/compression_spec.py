"""Names of gradient compressions, and the parameter that some of them take.

The command line checks specs with this file, so it must not import torch."""

from __future__ import annotations

from shoal.errors import ConfigError, did_you_mean

PLAIN = ("none", "bf16", "fp16", "onebit")
"""Compressions without a parameter."""
LARGEST_FRACTION = 0.5
"""Above this fraction, top-k sends more bytes than a gradient of float32 has."""


def read(text: str, powersgd: bool = False) -> tuple[str, float]:
    """Return name and number of `text`: none, bf16, fp16, onebit, topk=FRACTION or powersgd=RANK.

    Args: powersgd: True if the caller supports powersgd.

    Raises: ConfigError: an unknown name, a value for a compression that takes none, a value
        outside its range, or powersgd where the caller does not support it.
    """
    name, equals, value = text.partition("=")
    if name == "topk":
        return name, _fraction(text, value)
    if name == "powersgd" and powersgd:
        return name, _rank(text, value)
    if name == "powersgd":
        problem = "its products are means over ranks, and a server sums the gradients of each alone"
        cure = f"servers take topk=FRACTION, {', '.join(PLAIN)}; ddp takes powersgd=RANK"
        raise ConfigError(f"compression '{text}': {problem}; {cure}")
    if name not in PLAIN:
        hint = did_you_mean(name.lower(), [*PLAIN, "topk", *(["powersgd"] if powersgd else [])])
        raise ConfigError(f"compression '{text}' is not known; {hint}")
    if equals:
        raise ConfigError(f"compression '{text}': {name} takes no value; write '{name}'")
    return name, 0.0


def _fraction(text: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        problem = "topk needs the fraction of the numbers that is sent, as in topk=0.01"
        raise ConfigError(f"compression '{text}': {problem}") from None
    if not 0 < fraction <= LARGEST_FRACTION:
        problem = f"the fraction must be above 0 and at most {LARGEST_FRACTION}"
        why = "an index of 4 bytes goes with each number, so more would be larger than the gradient"
        raise ConfigError(f"compression '{text}': {problem}; {why}")
    return fraction


def _rank(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"compression '{text}': powersgd needs the rank of its matrices, as in powersgd=4"
        )
    return int(value)
