"""Which checkpoint is the best one, where saves fail: always the best of those that are there."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import MLP, tiny

from shoal.config.job import Job
from shoal.errors import CheckpointError
from shoal.testing import world
from shoal.train.checkpoint import newest, read_info
from shoal.train.task import Task

EPOCHS = {"train.epochs": 6, "checkpoint.every_steps": 100, "checkpoint.keep": 1}  # of four steps each


@dataclass(frozen=True)
class Scored(Task):
    """An evaluation finds what it is told to find."""

    accuracies: list[float] = field(default_factory=list)

    def report(self, sums: dict[str, float]) -> dict[str, float | int]:
        return {**super().report(sums), "top1": self.accuracies.pop(0)}


class FailsToSave(tiny_jobs.Undrawn):
    """Its evaluations find these accuracies, and one of its saves fails."""

    def __init__(self, job: Job, accuracies: list[float], failing: int) -> None:
        super().__init__(job)
        self.task = Scored(**vars(self.task), accuracies=list(accuracies))
        save = self.checkpoints.save

        def fails(step: int, *what: Any) -> Path:
            if step == failing:
                raise CheckpointError(f"step {step} was not saved: no room")
            return save(step, *what)

        self.checkpoints.save = fails  # type: ignore[method-assign,assignment]


def fails_to_save(job: Job, accuracies: list[float], failing: int) -> None:
    tiny_jobs.go(FailsToSave(job, accuracies, failing))


@pytest.mark.parametrize("beside", [False, True], ids=["waits", "beside"])
@pytest.mark.parametrize(
    ("accuracies", "best"),
    [([50, 60, 70, 55, 52, 51], (8, 60)), ([50, 60, 70, 65, 52, 51], (16, 65)), ([50, 60, 70, 75, 52, 51], (16, 75))],
    ids=["none that comes later is better than what was saved", "a later one is better than it", "and than all"],
)
def test_where_the_best_one_was_not_saved_the_best_that_was_is_kept(
    tmp_path: Path, beside: bool, accuracies: list[float], best: tuple[int, float]
) -> None:
    job = tiny(tmp_path / "run", MLP, EPOCHS, {"checkpoint.asynchronous": beside})
    world.run(1, fails_to_save, job, accuracies, 12)
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "best").read_text() == f"step-{best[0]:08}\n"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == [f"step-{best[0]:08}", "step-00000024"]
    last = newest(checkpoints)
    assert last is not None
    found = read_info(last)["best"]
    assert (found["step"], found["top1"]) == best
