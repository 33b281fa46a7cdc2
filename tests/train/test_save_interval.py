"""Saves of `checkpoint.every_steps: auto`: when they are due, and that nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import MLP, Undrawn, assert_equal_to_the_bit, everything, go, metrics, tiny, trains

from shoal import cli
from shoal.comm.axis import Axis
from shoal.config import read, to_yaml
from shoal.config.job import CheckpointConfig, Job
from shoal.testing import world
from shoal.train.run_saver import SaveInterval

# 40 steps, which only the interval interrupts. A step takes 1 s and a save 2 s by the clocks of
# `Timed`: with a failure every 10 s, Daly's interval is 5.06 s.
LONG = {
    **MLP,
    "train.epochs": 10,
    "evaluation.every": 100,
    "checkpoint.every_epochs": 100,
    "checkpoint.keep": 100,
}
AUTO = {**LONG, "checkpoint.every_steps": "auto", "checkpoint.job_mtbf": "10s"}
SAVED = [10, 15, 20, 25, 30, 35, 40]


class Times:
    """Clocks that a test moves, and an interval that is measured by them."""

    def __init__(self, mtbf: str = "12h") -> None:
        self.training_s = 0.0
        self.now_s = 100.0
        self.lines: list[str] = []
        settings = CheckpointConfig(every_steps="auto", job_mtbf=mtbf)
        alone = Axis(0, 1, torch.device("cpu"))
        self.interval = SaveInterval(
            settings, alone, self.lines.append, lambda: self.training_s, lambda: self.now_s
        )

    def train(self, steps: range, step_s: float) -> None:
        for step in steps:
            self.training_s += step_s
            self.interval.after_step(step)

    def save(self, step: int, save_s: float, succeeds: bool = True) -> None:
        self.interval.begin_save(step)
        self.now_s += save_s
        if succeeds:
            self.interval.end_save()

    def due(self) -> int:
        return next(step for step in itertools.count() if self.interval.is_due(step))


def test_the_first_save_is_measured_and_the_interval_follows_from_it() -> None:
    times = Times()
    assert times.due() == 10
    times.train(range(1, 2), 60.0)  # the first step compiles
    times.train(range(2, 11), 0.3)
    times.save(10, 1.2)
    # sqrt(2 * 1.2 * 43200) = 322 s
    assert times.due() == 10 + 1071
    assert times.lines == [
        "checkpoint.every_steps auto: every 1,071 steps (Daly: a save takes 1.20 s, a step 300 "
        "ms, the job's mean time between failures 12h)"
    ]


def test_the_interval_changes_with_what_is_measured_if_it_is_worth_it() -> None:
    times = Times()
    times.train(range(1, 11), 0.3)
    times.save(10, 1.2)
    times.train(range(11, 1082), 0.3)
    times.save(1081, 1.4)
    assert (times.due(), len(times.lines)) == (1081 + 1071, 1)
    times.train(range(1082, 2153), 0.3)
    times.save(2152, 10.0)  # 4.2 s on average
    assert times.due() == 2152 + 1999
    assert len(times.lines) == 2


def test_a_save_that_fails_is_tried_again_an_interval_later_and_not_measured() -> None:
    times = Times()
    times.train(range(1, 11), 0.3)
    times.save(10, 900.0, succeeds=False)
    assert (times.due(), times.lines) == (20, [])
    times.train(range(11, 21), 0.3)
    times.save(20, 1.2)
    assert "a save takes 1.20 s" in times.lines[0]


def test_a_save_after_one_step_measures_no_step() -> None:
    times = Times()
    times.train(range(1, 2), 60.0)
    times.save(1, 1.2)
    assert (times.due(), times.lines) == (11, [])


class Timed(Undrawn):
    """Has made-up clocks; those of rank 0 count."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        times: Iterator[float] = itertools.count(step=2.0 + 50.0 * self.run.rank)
        self.save_interval = SaveInterval(
            job.checkpoint,
            self.run.mesh,
            self._announce,
            lambda: float(self.step),
            lambda: next(times),
        )


class Lost(Exception):
    """A rank that is lost."""


class LostAt(Timed):
    """Loses its ranks after step 18, without any save."""

    def _step(self, batch: Any, epochs: float) -> None:
        super()._step(batch, epochs)
        if self.step == 18:
            raise Lost


def is_lost_and_goes_on(job: Job) -> None:
    with pytest.raises(Lost):
        go(LostAt(job))
    go(Timed(job))


def timed(job: Job) -> None:
    go(Timed(job))


def without_saves(directory: Path) -> dict[str, Any]:
    """What a run leaves behind, but for the interval and the names of older checkpoints."""
    found = everything(directory)
    found["info"].pop("save_interval", None)
    del found["checkpoints"]
    return found


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (directory / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "beside"),
    [("ddp", False), ("zero3", True)],
)
def test_a_run_is_the_same_with_any_interval_and_all_ranks_agree(
    tmp_path: Path, strategy: str, beside: bool
) -> None:
    more = {"strategy": strategy, "checkpoint.asynchronous": beside}
    world.run(2, trains, tiny(tmp_path / "fixed", LONG, more, checkpoint__every_steps=7))
    world.run(2, timed, tiny(tmp_path / "auto", AUTO, more))
    assert saved_steps(tmp_path / "auto") == SAVED
    world.run(2, is_lost_and_goes_on, tiny(tmp_path / "lost", AUTO, more))
    # Step 20 is due after that of 15: the interval was resumed.
    assert saved_steps(tmp_path / "lost") == SAVED
    for name in ("auto", "lost"):
        assert_equal_to_the_bit(without_saves(tmp_path / name), without_saves(tmp_path / "fixed"))
        assert metrics(tmp_path / name) == metrics(tmp_path / "fixed")


def test_a_run_of_a_file_says_what_was_chosen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml(tiny(tmp_path / "run", AUTO, checkpoint__job_mtbf="2 d")))
    trains(read(path).job)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "every_steps auto" in line]
    assert line.startswith("checkpoint.every_steps auto: every ")
    assert line.endswith("the job's mean time between failures 2 d)")


def test_a_strategy_whose_saves_change_the_numbers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits", "--out", str(tmp_path / "run"), "-n", "2", "--strategy", "local=4"]
    words += ["--checkpoint.every_steps", "auto", "--checkpoint.job_mtbf", "12h"]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "local averages the weights before each save" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
