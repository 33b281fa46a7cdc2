"""Machines: curves between their points, files and what is wrong in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.costs import machine
from shoal.costs.machine import PRESETS, Compute, Point, SpeedCurve
from shoal.costs.work import Affine, OpWork
from shoal.errors import ConfigError


def test_a_curve_is_a_line_in_logarithms_between_its_points() -> None:
    curve = SpeedCurve((Point(1.0, 10.0), Point(100.0, 1000.0)))
    assert curve.at(10.0) == pytest.approx(100.0, rel=1e-12)
    assert curve.at(0.1) == 10.0
    assert curve.at(1e6) == 1000.0


def test_a_time_grows_with_size_beyond_the_last_point() -> None:
    curve = SpeedCurve((Point(1.0, 1.0), Point(4.0, 2.0)))
    assert curve.seconds_at(8.0) == pytest.approx(4.0)


def test_an_operation_takes_its_overhead_and_the_time_of_its_flops() -> None:
    speeds = Compute(
        matmul=machine.flat(100.0),
        conv=machine.flat(50.0),
        memory=machine.flat(10.0),
        forward_op_s=1.0,
        backward_op_s=1.0,
        step_op_s=1.0,
        step_s=0.0,
        float32={"matmul": 0.1},
    )
    matmul = OpWork("matmul", Affine(0.0, 100.0), Affine(0.0, 1.0), 3, itemsize=2)
    assert speeds.op_s(matmul, 2, 1.0, 0.5) == pytest.approx(3 * (0.5 + 2.0))
    assert speeds.op_s(matmul, 2, 0.5, 0.5) == pytest.approx(3 * (0.5 + 1.0))
    in_float32 = matmul._replace(itemsize=4)
    assert speeds.op_s(in_float32, 2, 1.0, 0.5) == pytest.approx(3 * (0.5 + 20.0))
    addition = OpWork("memory", Affine(0.0, 0.0), Affine(20.0, 0.0), 1)
    assert speeds.op_s(addition, 9, 1.0, 0.5) == pytest.approx(2.5)


def test_a_saved_machine_is_read_back_as_it_was(tmp_path: Path) -> None:
    for preset in PRESETS.values():
        preset.save(tmp_path / "machine.json")
        assert machine.load(tmp_path / "machine.json") == preset


def test_presets_say_that_they_are_not_calibrated() -> None:
    assert {preset.calibrated for preset in PRESETS.values()} == {False}
    assert all("not measured" in preset.note for preset in PRESETS.values())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"server_rate": -1}, "server_rate=-1: must be greater than 0"),
        ({"server_part_s": -1}, "server_part_s=-1: must not be negative"),
        ({"colour": "red"}, "'colour'"),
        ({"compute": None}, "AttributeError"),
        ({"compute": {"1": {"matmul": {"points": [[1.0, -5.0]]}}}}, "must be greater than 0"),
        ({"compute": {"1": {"overheads": {"pipeline pass": -1e-3}}}}, "must not be negative"),
    ],
)
def test_a_bad_machine_file_is_refused(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    file = tmp_path / "bad.json"
    PRESETS["h100"].save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=f"is no machine file of .*calibrate` again.*{problem}"):
        machine.load(file)
