"""Figures that a script prints: those of rank 0 beside those of one process.

    ranks         epoch 0  loss 1.1524  acc 0.1406  3.1 s      rank 0's share of the samples
    one process   epoch 0  loss 2.3048  acc 0.2500  5.9 s

Lines are compared that say the same but for their numbers. Times and rates are left out, and so
are the numbers of ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import printable

FILE = "printed.txt"
"""Name of the file with what a rank has printed, in the folder of its record."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")
TIME = re.compile(
    r"(?:\b(?:time|took|eta|elapsed|speed|throughput)\b\W*\S*)"
    r"|(?:[\d.,:]+\s*(?:[nmu]?s|secs?|seconds?|min|minutes|h)\b)"
    r"|(?:\S*\s*\w+/(?:s|sec|second|it|step|batch|epoch)\b)"
    r"|(?:\d+:\d\d(?::\d\d)?)",
    re.IGNORECASE,
)
MOST_LINES = 3
MOST_CHARACTERS = 120
NOTE = (
    "rank 0 prints other figures than one process: {lines}. What a loop computes of a rank's "
    'samples is of these alone: shoal.all_reduce(torch.tensor([hits, seen]), op="sum") is of all, '
    "and run.evaluate goes over a whole validation set."
)


def other_figures(reference: Path, candidate: Path, ranks: int) -> str:
    """Return a note on lines with other figures; "" where there are none.

    Args: reference, candidate: folders of the first rank of either record.
    """
    known = defaultdict(list)
    for text, line, numbers in _lines(reference / FILE):
        known[text].append((line, numbers))
    pairs = []
    for text, line, numbers in _lines(candidate / FILE):
        if not known[text]:
            continue
        one, expected = known[text].pop(0)
        if any(_differ(*pair, ranks) for pair in zip(numbers, expected, strict=True)):
            pairs.append(f"'{line}', there '{one}'")
    more = f"; and {len(pairs) - MOST_LINES} lines more" if len(pairs) > MOST_LINES else ""
    return NOTE.format(lines="; ".join(pairs[:MOST_LINES]) + more) if pairs else ""


def _lines(file: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield of each line with figures its text without them, the line and the figures."""
    for line in (
        file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ()
    ):
        figures = TIME.sub(" ", line)
        if numbers := NUMBER.findall(figures):
            yield NUMBER.sub("#", figures), printable(line.strip())[:MOST_CHARACTERS], numbers


def _differ(one: str, other: str, ranks: int) -> bool:
    """Return True if two figures differ by more than one in the last digit that is printed."""
    if (one, other) == (str(ranks), "1"):
        return False
    mantissa, _, power = one.partition("e")
    digit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    unit = digit if "." in mantissa or power else 0.0
    return abs(float(one) - float(other)) > 1.5 * unit + 1e-9 * abs(float(other))
