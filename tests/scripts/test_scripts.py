"""Scripts under strategies: their verdicts are those of docs/scripts.md, and none is a defect."""

import pytest

from tests.scripts.report import RECORD, read
from tests.scripts.runner import BY_DESIGN, DEFECTS, EXACT, FORM, LAYOUTS, Layout, judge_all
from tests.scripts.script import catalog

EVERYDAY = [
    "ForgottenClassWeights",
    "ImageTextPairs",
    "DetectionLists",
    "ChatTuning",
    "NanoGpt",
    "Lora",
    "MeanTeacher",
    "ExpertsBalanced",
    "Forces",
    "SparseClicks",
]
LOOPS = {
    "ClassWeights": EXACT,
    "Dcgan": EXACT,
    "DcganDrawn": BY_DESIGN,
    "WassersteinPenalty": EXACT,
    "ChatTuning": EXACT,
    "NanoGpt": EXACT,
    "WordLanguageModel": EXACT,
    "ConfidentMean": EXACT,
}
"""Scripts in which the loop may compute the loss, and their verdicts then."""


def test_a_loss_that_the_loop_computes_gives_the_same_digits(monkeypatch):
    monkeypatch.setenv(FORM, "loop")
    cells = judge_all([*LOOPS], Layout("zero3", 2))
    assert {name: cell.verdict for name, cell in cells.items()} == LOOPS


def check(names, layout):
    """Measure cells; none may be a defect, and those of the record must be as they were."""
    recorded = {name: read(RECORD).get((name, *layout)) for name in names}
    cells = judge_all(names, layout)
    assert {n: cell for n, cell in cells.items() if cell.verdict in DEFECTS} == {}
    expected = {name: cell.verdict for name, cell in recorded.items() if cell is not None}
    assert {name: cells[name].verdict for name in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_handful_of_scripts_on_two_ranks(strategy):
    check(EVERYDAY, Layout(strategy, 2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_script(layout):
    check(list(catalog()), layout)
