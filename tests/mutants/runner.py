"""Runs many loops in one world of two ranks, and compares each with itself in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from shoal.testing import world
from shoal.verification.script.run_comparison import SAME_DRAWS, compare_runs
from shoal.verification.script.run_record import read_run
from tests.mutants.mutant import OF_LOSS, OF_SAMPLES, Mutant, mutants
from tests.mutants.peers import Peers
from tests.mutants.recording import record_candidate, record_reference

RANKS = 2
CURVE = 1e-2
"""A relative difference of losses that one would notice in a curve."""
LOOSE = 1e-3
"""A tolerance as people choose it for gradients and weights."""


class Case(NamedTuple):
    """A loop to run: its name, and the seed."""

    name: str
    seed: int = 0


class Found(NamedTuple):
    """The result of a comparison.

    Attributes:
        verdict: of the report.
        module: of the first difference; `OF_LOSS` is the loss itself.
        what: words for the first difference.
        cause: the class of its cause.
        error: of the first difference; None where it is infinite, or none.
        largest: the largest relative error where nothing differs.
        curve: the largest relative difference of a step's losses.
        loose: the verdict at the tolerance `LOOSE`.
        noted: a note says that ranks draw the same random numbers.
    """

    verdict: str
    module: str | None
    what: str
    cause: str
    error: float | None
    largest: float | None
    curve: float
    loose: str
    noted: bool = False

    @property
    def is_caught(self) -> bool:
        """Return True if the verdict says that the runs differ."""
        return self.verdict.startswith("differs")

    def names_module(self, mutant: Mutant) -> bool:
        """Return True if the right module is named first."""
        return self.is_caught and self.module in (mutant.modules or ())

    def names_cause(self, mutant: Mutant) -> bool:
        """Return True if the class of the cause is right."""
        return self.is_caught and self.cause in mutant.causes


def judge(cases: Sequence[Case], timeout_s: float = 300.0) -> dict[Case, Found]:
    """Run loops on two ranks and alone, in one world, and compare them."""
    found: dict[Case, Found] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-mutants-") as folder:
        for part in world.run(RANKS, _judge_in_rank, cases, folder, timeout_s=timeout_s):
            found.update(part)
    return {case: found[case] for case in cases}


def _judge_in_rank(cases: Sequence[Case], folder: str) -> dict[Case, Found]:
    """Take part in all candidates, and return the results of this rank's share of them."""
    torch.set_num_threads(1)
    peers = Peers(distributed.get_rank(), distributed.get_world_size())
    known = mutants()
    for index, case in enumerate(cases):
        place = Path(folder, str(index), "candidate")
        record_candidate(known[case.name].loop, place, peers, case.seed)
    peers.barrier()
    return {
        case: _compared(known[case.name], case, Path(folder, str(index)))
        for index, case in enumerate(cases)
        if index % peers.size == peers.rank
    }


def _compared(mutant: Mutant, case: Case, folder: Path) -> Found:
    many, one = folder / "candidate", folder / "reference"
    record_reference(mutant.loop, one, many, case.seed)
    report = compare_runs(one, many)
    first = report.first
    module, what, error = None, "", None
    if first is not None:
        places = {"loss": OF_LOSS, "batches": OF_SAMPLES}
        module = places.get(first.phase, first.module)
        what = first.what
        error = first.error if first.error != float("inf") else None
    return Found(
        report.verdict,
        module,
        what,
        report.cause.kind,
        error,
        report.largest if first is None else None,
        _curve(one, many),
        compare_runs(one, many, LOOSE).verdict,
        SAME_DRAWS in report.notes,
    )


def _curve(one: Path, many: Path) -> float:
    """Return the largest relative difference of a step's losses, averaged over the ranks."""
    expected, ranks = read_run(one)[0].steps, read_run(many)
    worst = 0.0
    for index, step in enumerate(expected):
        losses = [sum(record.steps[index].losses) for record in ranks]
        value = sum(step.losses)
        worst = max(worst, abs(sum(losses) / len(losses) - value) / max(abs(value), 1e-12))
    return worst


def as_json(found: Found) -> dict[str, Any]:
    """Return values for JSON."""
    return found._asdict()
