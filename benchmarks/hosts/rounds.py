"""Rounds of measurements on hosts: a link by itself, then every cell once, in an order that
chance makes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from benchmarks.hosts.step import link


class Cell(Protocol):
    """One thing to measure: a named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=Cell)


def measure_round(
    result: dict[str, Any],
    number: int,
    cells: Sequence[C],
    measured: Callable[[C], dict[str, float]],
    size_bytes: int,
) -> None:
    """Add round `number` to the lists in `result["cells"]`, and a link's speed to
    `result["link_bytes_per_s"]`.

    Args: measured: seconds of a step, and the share of the cores' time that was used. size_bytes:
    sent over the link."""
    result["link_bytes_per_s"].append(link(size_bytes))
    for cell in random.Random(number).sample(cells, len(cells)):
        found = measured(cell)
        print(
            *cell._asdict().values(),
            {name: round(value, 3) for name, value in found.items()},
            flush=True,
        )
        known = [kept for kept in result["cells"] if {**kept, **cell._asdict()} == kept]
        if not known:
            known = [{**cell._asdict(), "step_s": [], "busy": []}]
            result["cells"] += known
        for name, value in found.items():
            known[0][name].append(value)
