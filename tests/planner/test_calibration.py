"""`shoal calibrate` in small. What its numbers are worth, benchmarks/plan tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from quick_calibration import NETWORKS, measure_few_points

from shoal.costs import machine
from shoal.costs.machine import Compute, flat, low_and_spread
from shoal.planner import calibration, operation_speeds
from shoal.planner.calibration import calibrate, rank_counts, summary
from shoal.planner.operation_speeds import in_steps, nonnegative_least_squares, traced


def test_ranks_are_measured_up_to_twice_the_cores_and_eight() -> None:
    assert [rank_counts(cores) for cores in (1, 2, 3, 64)] == [
        [1, 2],
        [1, 2, 4],
        [1, 2, 4],
        [1, 2, 4, 8],
    ]


def test_a_calibration_has_all_that_a_plan_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((line, names, (case, *_)),) = (e for e in calibration.engines(2) if e[0] == "tensor=2")
    for name, value in (
        ("rank_counts", lambda cores: [2]),
        ("_measure_rank", measure_few_points),
        ("engines", lambda ranks: [(line, names, [case])]),
        ("networks_of", lambda layers: []),
    ):
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(operation_speeds, "NETWORKS", NETWORKS)
    lines: list[str] = []
    measured = calibrate(lines.append)
    speeds = measured.compute[2]
    for curve in (speeds.matmul, speeds.conv, speeds.memory):
        assert all(point.value > 0 for point in curve.points)
    assert speeds.forward_op_s > 0
    assert set(speeds.overheads) == {"tensor sum"}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    backends = ("shoal", "gloo")
    assert set(measured.collectives) == {f"{each}/{kind}/2" for each in backends for kind in kinds}
    assert lines[0].startswith("2 ranks at once: measured in ")
    assert measured.calibrated
    assert measured.server_part_s in calibration.PART_S
    assert measured.server_rate in calibration.SERVER_RATES
    assert measured.overlap_slowdown >= 1
    measured.save(tmp_path / "machine.json")
    assert machine.load(tmp_path / "machine.json") == measured
    assert summary(measured).splitlines()[1].split()[0] == "2"


def test_speeds_in_steps_are_those_that_the_steps_were_made_of() -> None:
    hot = Compute(flat(8e10), flat(4e10), flat(2e10), 0.0, 0.0, 0.0, step_s=0.0)
    cold = replace(
        hot.slower(2.0), forward_op_s=3e-5, backward_op_s=2e-5, step_op_s=1e-5, conv=flat(1e10)
    )
    phases = [
        (
            sum(cold.op_s(op, samples, 1.0, 3e-5) for part in work.segments for op in part.forward),
            sum(
                cold.op_s(op, samples, 1.0, 2e-5) for part in work.segments for op in part.backward
            ),
            sum(cold.op_s(op, 0.0, 1.0, 1e-5) for op in work.optimizer),
        )
        for work, _, samples in map(traced, operation_speeds.NETWORKS)
    ]
    solved = in_steps((hot.matmul, hot.conv, hot.memory), phases)
    for name in ("forward_op_s", "backward_op_s", "step_op_s"):
        assert getattr(solved, name) == pytest.approx(getattr(cold, name), rel=1e-3)
    for name in ("matmul", "conv", "memory"):
        assert getattr(solved, name).at(1.0) == pytest.approx(getattr(cold, name).at(1.0), rel=1e-3)


def test_fewer_ranks_are_not_slower_than_more() -> None:
    quiet = Compute(flat(8e10), flat(4e10), flat(2e10), 3e-5, 2e-5, 1e-5, step_s=1e-3)
    loud = replace(quiet.slower(1.6), matmul=flat(9e10))
    assert loud.or_faster(quiet) == replace(quiet, matmul=flat(9e10))


def test_ranks_whose_engines_were_not_measured_have_overheads_by_the_cost_of_an_operation() -> None:
    two = Compute(
        flat(8e10), flat(4e10), flat(2e10), 3e-5, 2e-5, 1e-5, 1e-3, overheads={"tensor sum": 1e-3}
    )
    compute = {
        1: replace(two, forward_op_s=2e-5, overheads={}),
        2: two,
        4: replace(two.slower(1.5), overheads={}),
    }
    found = {ranks: calibration._with_overheads(ranks, compute).overheads for ranks in compute}
    assert found == {
        1: {"tensor sum": pytest.approx(1e-3)},
        2: {"tensor sum": pytest.approx(1e-3)},
        4: {"tensor sum": pytest.approx(1.5e-3)},
    }


def test_what_engines_take_is_at_least_nothing() -> None:
    rows = [[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]]
    exact = [3.0 * a + 0.5 * b for a, b in rows]
    assert nonnegative_least_squares(rows, exact) == pytest.approx([3.0, 0.5])
    first, second = nonnegative_least_squares(rows, [1.0, 2.5, 1.1])
    assert (first > 1.0, second) == (True, 0.0)


def test_a_low_sample_is_not_the_one_that_stolen_time_was_taken_off() -> None:
    low, spread = low_and_spread([0.0, *([2.0] * 12), 3.0, 4.0, *([5.0] * 12)])
    assert (low, spread) == (2.0, 0.5)
