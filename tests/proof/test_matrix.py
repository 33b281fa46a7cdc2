"""docs/verified.md says what is so."""

from pathlib import Path

import pytest

from shoal.proof.matrix import LAYOUTS, words
from shoal.proof.zoo import EXPERIMENTS

PAGE = Path(__file__).parents[2] / "docs/verified.md"


def test_the_page_has_every_cell_and_nothing_but_what_is_exact_by_design_or_refused() -> None:
    cells = words(PAGE.read_text())
    assert set(cells) == {(name, layout) for name in EXPERIMENTS for layout in LAYOUTS}
    assert set(cells.values()) <= {"exact", "by design", "refused"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_synchronous_cell_is_exact_or_says_why_not(name: str) -> None:
    cells = words(PAGE.read_text())
    for (model, layout), word in cells.items():
        if model == name and word == "refused":
            assert layout[0].startswith(("recompute", "tensor")), f"{name} under {layout} is refused"
