"""The catalog of scripts is complete, and its judge is strict."""

import torch

from tests.scripts.runner import (
    BY_DESIGN,
    EXACT,
    FOREIGN,
    HANG,
    REFUSED,
    SILENT,
    UNCHECKED,
    Outcome,
    judge,
    reference,
)
from tests.scripts.script import NEEDS, Script, catalog, lines_changed

EXPECTED = [1.0], {"weight": torch.tensor([1.0, 2.0])}
RIGHT = Outcome("ran", "", (1.0,), {"weight": torch.tensor([1.0, 2.0])})
WRONG = Outcome("ran", "", (1.0,), {"weight": torch.tensor([1.0, 2.1])})
NOTED = WRONG._replace(notes=("note: dropout draws other masks: same distribution, other numbers",))
LOST = Outcome("refused", "PeerLost: rank 1 has ended", secondary=True)


class Drawing(Script):
    """A script that draws random numbers."""

    needs = "R"


def verdict(*outcomes, script=Drawing):
    return judge(script, EXPECTED, outcomes).verdict


def test_the_catalog_has_enough_kinds_of_script_and_every_need():
    scripts = catalog()
    assert len(scripts) >= 60
    used = set("".join(script.needs for script in scripts.values()))
    assert used == set(NEEDS)


def test_every_plain_script_trains():
    for name in catalog():
        losses, weights = reference(name)
        assert len(losses) >= 3, name
        assert all(torch.isfinite(value).all() for value in weights.values()), name


def test_few_lines_change():
    changed = {name: lines_changed(script) for name, script in catalog().items()}
    assert sorted(changed.values())[len(changed) // 2] <= 10
    assert max(changed.values()) <= 30, changed


def test_equal_numbers_are_exact():
    assert verdict(RIGHT, RIGHT) == EXACT


def test_other_numbers_on_one_rank_are_silent_without_a_note():
    assert verdict(RIGHT, WRONG) == SILENT
    assert verdict(NOTED, WRONG) == BY_DESIGN


def test_a_note_on_random_numbers_excuses_no_script_without_them():
    assert verdict(NOTED, WRONG, script=Script) == SILENT


def test_a_note_that_a_loss_was_not_checked_is_a_verdict_of_its_own():
    class Coupled(Script):
        needs = "G"

    note = "note: compute_loss was not compared on parts: nothing has checked that it is."
    assert verdict(WRONG._replace(notes=(note,)), WRONG, script=Coupled) == UNCHECKED
    assert verdict(WRONG._replace(notes=(note,)), WRONG) == SILENT


def test_missing_weights_and_nan_are_silent_differences():
    assert verdict(RIGHT, RIGHT._replace(weights={})) == SILENT
    assert verdict(RIGHT, RIGHT._replace(losses=(float("nan"),))) == SILENT


def test_a_refusal_counts_where_the_others_only_lost_their_peer():
    assert verdict(Outcome("refused", "UsageError: no"), LOST) == REFUSED
    assert verdict(LOST, LOST) == FOREIGN
    assert verdict(RIGHT, LOST) == FOREIGN


def test_an_error_of_torch_is_foreign_and_a_rank_that_waits_hangs():
    assert verdict(Outcome(FOREIGN, "RuntimeError"), Outcome("refused", "UsageError")) == FOREIGN
    assert verdict(Outcome(HANG, "stacks"), RIGHT) == HANG
