"""Every strategy trains as one process does: gradients and SGD weights agree to 1e-10 in float64.

docs/verified.md is the table; here its cells are computed again.
"""

from pathlib import Path

import pytest

from shoal.verification import verify_job
from tests.matrix.cases import EXPERIMENTS
from tests.matrix.report import LAYOUTS, read

MEASURED = read(Path(__file__).parents[2] / "docs/verified.json")
MODELS = list(EXPERIMENTS)
SMALL = [layout for layout in LAYOUTS if layout[1] <= 4]
# Every third strategy on one model, in turn, but for those whose cells take seconds; the rest is
# behind a marker: `make test-slow`.
LARGE = ("U-Net", "ResNet", "Transformer", "gpt", "lstm")
TURNS = {(layout, MODELS[7 * turn % len(MODELS)]) for turn, layout in enumerate(SMALL[1::3])}
EVERY_DAY = {(layout, name) for layout, name in TURNS if not name.startswith(LARGE)}


CELLS = [
    (layout, name) for layout in LAYOUTS for name in EXPERIMENTS if (name, *layout) in MEASURED
]


@pytest.mark.parametrize(
    ("layout", "name"),
    [cell if cell in EVERY_DAY else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS],
)
def test_a_cell_of_the_page_is_what_it_says(layout: tuple[str, int, int], name: str) -> None:
    strategy, ranks, accumulate = layout
    verdict = verify_job(EXPERIMENTS[name], strategy, ranks, accumulate=accumulate, timeout_s=60)
    assert verdict.verdict == MEASURED[name, *layout].verdict, verdict
