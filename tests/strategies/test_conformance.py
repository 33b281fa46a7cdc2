"""Every strategy trains as one process does: gradients and SGD weights agree to 1e-10 in float64.

docs/verified.md is the table; here its cells are computed again.
"""

from pathlib import Path

import pytest

from shoal.proof import prove
from shoal.proof.matrix import LAYOUTS, read
from shoal.proof.zoo import EXPERIMENTS

MEASURED = read(Path(__file__).parents[2] / "docs/verified.json")
# The rest of the page is behind a marker: `make test-slow`.
CORE = [
    *(("ddp", 3, 4), ("zero2", 2, 2), ("zero3", 3, 4)),
    *(("tensor=2,zero1", 4, 2), ("pipeline=2,zero3", 4, 2)),
]


def test_the_core_is_part_of_the_page() -> None:
    assert set(CORE) < set(LAYOUTS)


CELLS = [(layout, name) for layout in LAYOUTS for name in EXPERIMENTS if (name, *layout) in MEASURED]


@pytest.mark.parametrize(
    ("layout", "name"),
    [cell if cell[0] in CORE else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS],
)
def test_a_cell_of_the_page_is_what_it_says(layout: tuple[str, int, int], name: str) -> None:
    strategy, ranks, accumulate = layout
    verdict = prove(EXPERIMENTS[name], strategy, ranks, accumulate=accumulate, timeout_s=60)
    assert verdict.verdict == MEASURED[name, *layout].verdict, verdict
