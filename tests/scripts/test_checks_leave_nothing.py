"""Scripts with all checks and without any: equal losses, weights and generators, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.scripts.runner import CHECKS, Layout, Outcome, run_all
from tests.scripts.script import catalog


def differences(names: Sequence[str], layout: Layout, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what differs in scripts that end well with checks."""
    found = run_all(names, layout)
    ran = [name for name, outcomes in found.items() if all(o.kind == "ran" for o in outcomes)]
    assert ran
    # The last bit depends on where memory lies, and so on the scripts that the process ran before:
    # both runs have the same ones.
    checked = run_all(ran, layout) if len(ran) < len(names) else found
    monkeypatch.setenv(CHECKS, "off")
    unchecked = run_all(ran, layout)
    return [
        f"{name}, rank {rank}: {difference}"
        for name in ran
        for rank, pair in enumerate(zip(checked[name], unchecked[name], strict=True))
        for difference in apart(*pair)
    ]


def apart(one: Outcome, other: Outcome) -> Iterator[str]:
    """Yield what differs between two outcomes."""
    if other.kind != "ran":
        yield f"{other.kind} without checks: {other.text[-300:]}"
        return
    if one.losses != other.losses:
        yield f"losses {one.losses} and {other.losses}"
    assert one.weights is not None
    assert other.weights is not None
    same = [torch.equal(one.weights[name], other.weights[name]) for name in one.weights]
    if not all(same):
        yield f"{same.count(False)} of {len(same)} weights"
    if one.generators != other.generators:
        yield "random numbers"


@pytest.mark.slow
def test_checks_leave_a_handful_of_scripts_as_they_are(monkeypatch):
    names = ("ClassWeights", "ImageTextPairs", "Dcgan")
    assert differences(names, Layout("ddp", 2), monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout("ddp", 2),
        Layout("ddp", 2, 2),
        Layout("zero3", 2),
        Layout("tensor=2", 2),
        Layout("local=2", 2),
    ],
    ids=str,
)  # a pipeline is cut by measured times, so two runs may add in another order
def test_checks_leave_every_script_as_it_is(layout, monkeypatch):
    assert differences([*catalog()], layout, monkeypatch) == []
