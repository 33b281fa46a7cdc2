"""`shoal plan RUN`: a plan beside the trace of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli import program
from shoal.config import read, to_yaml
from shoal.costs.machine import UNKNOWN_CPU, Point, SpeedCurve, default_path, load
from shoal.trace import chrome
from shoal.trace.recorder import BACKWARD, EXCHANGE, FORWARD, OPTIMIZER, STEP, Span
from shoal.train.run_directory import CONFIG

MS = 1_000_000


def spans(late_ms: int) -> list[Span]:
    """Return a step of 100 ms: 60 of computing, an exchange of 20 from 70 on, the optimizer."""
    entered = (60 + late_ms) * MS
    return [
        Span(STEP, "step 3", 0, 100 * MS),
        Span(FORWARD, "forward", 0, 20 * MS),
        Span(BACKWARD, "backward", 20 * MS, 60 * MS),
        Span(EXCHANGE, "all_reduce", entered, 90 * MS, 1000, "0", 1, (0, 1)),
        Span(OPTIMIZER, "optimizer", 90 * MS, 95 * MS),
    ]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = read("digits", [("model.options", "{widths: [8, 16]}")]).job
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIG).write_text(to_yaml(replace(job, strategy="ddp")))
    chrome.write(chrome.Trace({0: spans(0), 1: spans(10)}, {0: "a", 1: "a"}, [3]), folder)
    return folder


def shoal_plan(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        program.main(["plan", *map(str, words)])
    return int(ended.value.code or 0)


def test_each_term_is_told_predicted_and_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal_plan(run) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if " ms" in line}
    assert rows["compute"][3:5] == ["60", "ms"]
    assert rows["all_reduce"][3:5] == ["20", "ms"]
    assert rows["optimizer"][3:5] == ["5.00", "ms"]
    assert rows["data"][1] == "-"
    assert "most off: compute, by " in out
    assert f"{run}: ddp on 2 ranks; NOT CALIBRATED" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", "2"), "--processes: a run is compared as it was"),
        (("--strategy", "zero1"), "--strategy: a run is compared as it was"),
        (("--train.batch_size", "3"), "--train.batch_size: a run is compared as it was"),
        (("--memory", "much"), "--memory: 'much'"),
        (("--machine", "h10"), "did you mean 'h100'?"),
    ],
    ids=["ranks", "strategy", "setting", "memory", "machine"],
)
def test_a_run_is_compared_as_it_was(
    run: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert shoal_plan(run, *words) == 2
    assert message in capsys.readouterr().err


def test_a_recalibrated_machine_predicts_what_the_run_took(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = SpeedCurve((Point(1.0, 1e-3),))
    collectives = {"shoal/all_reduce/2": curve, "shoal/all_gather/2": curve}
    replace(UNKNOWN_CPU, calibrated=True, collectives=collectives).save(default_path())
    assert shoal_plan(run, "--recalibrate") == 0
    assert "are now those of" in capsys.readouterr().out
    assert shoal_plan(run) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["compute"][1:5] == ["60", "ms", "60", "ms"]
    assert rows["all_reduce"][1:5] == ["20", "ms", "20", "ms"]
    assert load(default_path()).collectives["shoal/all_gather/2"] == curve


def test_without_a_calibration_or_a_run_there_is_nothing_to_recalibrate(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal_plan(run, "--recalibrate") == 2
    assert "Run `shoal calibrate` first" in capsys.readouterr().err
    assert shoal_plan("digits", "--recalibrate") == 2
    assert "takes a traced run" in capsys.readouterr().err
