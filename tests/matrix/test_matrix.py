"""docs/verified.md agrees with docs/verified.json, and all cells are good."""

from pathlib import Path

from tests.matrix.cases import EXPERIMENTS
from tests.matrix.report import LAYOUTS, page, read

PAGE = Path(__file__).parents[2] / "docs/verified.md"
CELLS = read(PAGE.with_suffix(".json"))


def test_every_cell_was_measured_and_none_differs() -> None:
    assert set(CELLS) == {(name, *layout) for name in EXPERIMENTS for layout in LAYOUTS}
    assert {cell.verdict for cell in CELLS.values()} <= {"exact", "differs by design", "refused"}


def test_the_page_is_what_was_measured() -> None:
    # All but the line of versions, which are those of whoever measured.
    assert PAGE.read_text().split("Written by")[0] == page(CELLS).split("Written by")[0]


def test_a_cell_that_is_not_exact_says_why() -> None:
    for (name, strategy, *_), cell in CELLS.items():
        assert cell.verdict == "exact" or cell.reasons, f"{name} under {strategy}"
        if cell.verdict == "refused":
            refusing = ["recompute", "tensor"]
            if name == "cnn with BatchNorm of all ranks":
                refusing += ["pipeline", "local", "diloco"]
            if any("places between blocks" in reason for reason in cell.reasons):
                refusing += ["pipeline"]
            assert strategy.startswith(tuple(refusing)) or "unit=" in strategy, (
                f"{name} under {strategy}"
            )
