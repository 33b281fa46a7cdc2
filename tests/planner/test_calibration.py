"""`shoal calibrate` in small. What its numbers are worth, benchmarks/plan tells."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from quick_calibration import measure_few_points

from shoal.costs import machine
from shoal.planner import calibration
from shoal.planner.calibration import calibrate, rank_counts, summary, tiny_blocks


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
    tensor = {("tensor sum",): calibration.ENGINES["tensor sum",]}
    for name, value in (
        ("rank_counts", lambda cores: [2]),
        ("_measure_rank", measure_few_points),
        ("WHOLE", (partial(tiny_blocks, 2),)),
        ("ENGINES", tensor),
    ):
        monkeypatch.setattr(calibration, name, value)
    lines: list[str] = []
    measured = calibrate(lines.append)
    speeds = measured.compute[2]
    for curve in (speeds.matmul, speeds.conv, speeds.memory):
        assert all(point.value > 0 for point in curve.points)
    assert speeds.forward_op_s > 0
    assert speeds.whole_step >= 1
    assert set(speeds.overheads) == {"tensor sum"}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    assert set(measured.collectives) == {f"shoal/{kind}/2" for kind in kinds}
    assert lines[0].startswith("2 ranks at once: measured in ")
    assert measured.calibrated
    assert measured.server_rate > 0
    assert measured.overlap_slowdown >= 1
    measured.save(tmp_path / "machine.json")
    assert machine.load(tmp_path / "machine.json") == measured
    assert summary(measured).splitlines()[1].split()[0] == "2"
