"""Which checkpoint is the best one, where saves fail: always the best of those that are there."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import MLP, tiny

from shoal.checkpoint import newest, read_info
from shoal.checkpoint.store import Division
from shoal.config.job import Job
from shoal.errors import CheckpointError
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world
from shoal.train.task import Task

EPOCHS = {
    "train.epochs": 6,
    "checkpoint.every_steps": 100,
    "checkpoint.keep": 1,
}  # of four steps each


@dataclass(frozen=True)
class Scored(Task):
    """An evaluation finds what it is told to find."""

    accuracies: list[float] = field(default_factory=list)

    def report(self, sums: dict[str, float]) -> dict[str, float | int]:
        return {**super().report(sums), "top1": self.accuracies.pop(0)}


class FailsToSave(tiny_jobs.Undrawn):
    """Its evaluations find these accuracies, and the first save of one step fails."""

    def __init__(self, job: Job, accuracies: list[float], failing: int) -> None:
        super().__init__(job)
        self.task = Scored(**vars(self.task), accuracies=list(accuracies))
        write, failing_steps = self.checkpoints.write, [failing]

        def fails(division: Division, *what: Any) -> Path:
            if division.step in failing_steps:
                failing_steps.remove(division.step)
                raise CheckpointError(f"step {division.step} was not saved: no room")
            return write(division, *what)

        self.checkpoints.write = fails  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("accuracies", "best", "beside"),
    [
        ([50, 60, 70, 55, 52, 51], (8, 60), False),
        ([50, 60, 70, 65, 52, 51], (16, 65), True),
        ([50, 60, 70, 75, 52, 51], (16, 75), False),
    ],
    ids=[
        "none that comes later is better than what was saved",
        "a later one is better than it, beside",
        "and than all",
    ],
)
def test_where_the_best_one_was_not_saved_the_best_that_was_is_kept(
    tmp_path: Path, beside: bool, accuracies: list[float], best: tuple[int, float]
) -> None:
    job = tiny(tmp_path / "run", MLP, EPOCHS, {"checkpoint.asynchronous": beside})
    tiny_jobs.go(FailsToSave(job, accuracies, 12))
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "best").read_text() == f"step-{best[0]:08}\n"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == [
        f"step-{best[0]:08}",
        "step-00000024",
    ]
    last = newest(checkpoints)
    assert last is not None
    found = read_info(last)["best"]
    assert (found["step"], found["top1"]) == best


class StopsWhereItCannotSave(FailsToSave):
    """Is told to stop in the step whose save fails at first."""

    def _step(self, batch: Any, epochs: float) -> None:
        if self.step == 11:
            self.run.request_stop()
        super()._step(batch, epochs)


def stops_where_it_cannot_save(job: Job) -> None:
    tiny_jobs.go(StopsWhereItCannotSave(job, [50, 60, 70], 12))


@pytest.mark.parametrize("beside", [False, True], ids=["waits", "beside"])
def test_what_a_stop_saves_at_the_second_try_is_the_best_one_still(
    tmp_path: Path, beside: bool
) -> None:
    job = tiny(tmp_path / "run", MLP, EPOCHS, {"checkpoint.asynchronous": beside})
    with world.start(1, stops_where_it_cannot_save, job) as stopping:
        assert stopping.wait() == [EXIT_RESTART]
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "best").read_text() == "step-00000012\n"
    assert read_info(checkpoints / "step-00000012")["best"]["top1"] == 70
