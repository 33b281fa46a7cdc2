"""Planted bugs are caught, with the right module and cause; harmless changes stay silent."""

import pytest

from tests.mutants.mutant import mutants
from tests.mutants.runner import Case, judge

BUGS = (
    "SumForMean",
    "TokenMeanPerRank",
    "MissedParameter",
    "BiasOnEveryRank",
    "ScaledAtTheBorder",
    "UpdateNotShared",
    "StagesSwapped",
    "SameRows",
)
HARMLESS = (
    "RightTensorParallel",
    "RightPipeline",
    "GatheredSum",
    "OtherOwners",
    "ShoalPipeline",
)


def test_planted_bugs_are_named_and_harmless_changes_stay_silent() -> None:
    known = mutants()
    for case, found in judge([Case(name) for name in (*BUGS, *HARMLESS)]).items():
        mutant = known[case.name]
        if mutant.is_bug:
            assert found.names_module(mutant), f"{case.name}: {found}"
            assert found.names_cause(mutant), f"{case.name}: {found}"
        else:
            assert found.verdict == "exact", f"{case.name}: {found}"


def test_at_least_fourteen_of_forty_bugs_have_a_public_report() -> None:
    bugs = [mutant for mutant in mutants().values() if mutant.is_bug]
    assert len(bugs) >= 40
    assert sum(bool(bug.links) for bug in bugs) >= 14
    assert sum(not mutant.is_bug for mutant in mutants().values()) >= 12


@pytest.mark.slow
def test_three_hundred_healthy_runs_raise_no_alarm() -> None:
    names = [name for name, mutant in mutants().items() if not mutant.is_bug]
    cases = [Case(names[i % len(names)], 1 + i // len(names)) for i in range(300)]
    found = judge(cases, timeout_s=1800.0)
    assert {case: value for case, value in found.items() if value.verdict != "exact"} == {}
