"""A job with steps that are not finite: they are skipped, told, and never saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import MLP, Undrawn, go, metrics, tiny

from shoal.checkpoint import newest, tensor_files
from shoal.config.job import Job
from shoal.errors import LaunchError
from shoal.testing import world


class SpoilsBatches(Undrawn):
    """Gets samples that are NaN in some steps, on one rank."""

    def __init__(self, job: Job, steps: tuple[int, ...], rank: int) -> None:
        super().__init__(job)
        self.spoiled_at, self.on = steps, rank
        self.tried = 0

    def _step(self, batch: Any, epochs: float) -> None:
        if self.tried in self.spoiled_at and self.run.rank == self.on:
            batch[0].fill_(math.nan)
        self.tried += 1
        super()._step(batch, epochs)


def meets_nan(job: Job, steps: tuple[int, ...], rank: int) -> tuple[int, int]:
    training = SpoilsBatches(job, steps, rank)
    go(training)
    return training.step, training.run._prepared.nonfinite_steps.skipped


class LosesAWeight(Undrawn):
    """Has an infinite weight on one rank after step 5."""

    def _step(self, batch: Any, epochs: float) -> None:
        super()._step(batch, epochs)
        if self.step == 5 and self.run.rank == 1:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = math.inf


def loses_a_weight(job: Job) -> None:
    go(LosesAWeight(job))


def checkpoints_of(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("step-*"))


def is_finite(checkpoint: Path) -> bool:
    tensors = tensor_files.read(checkpoint, lambda name: name.startswith(("model.", "optimizer.")))
    return all(bool(value.isfinite().all()) for value in tensors.values())


def test_steps_on_nan_samples_are_skipped_and_what_is_saved_and_logged_is_finite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = tiny(tmp_path, MLP, checkpoint__keep=9, train__ema=0.9)
    results = world.run(2, meets_nan, job, (2, 3, 5), 1)
    assert results == [(12, 3)] * 2
    assert "step 3 is not finite: the loss of rank 1 is nan" in capfd.readouterr().err
    assert all(is_finite(checkpoint) for checkpoint in checkpoints_of(tmp_path))
    losses = [record["loss"] for record in metrics(tmp_path)]
    assert losses.count(None) == 1  # of steps 3 and 4 alone
    assert (tmp_path / "checkpoints/best").is_file()


def test_ten_in_a_row_end_the_run_and_the_last_checkpoint_is_from_before(tmp_path: Path) -> None:
    job = tiny(tmp_path, MLP, train__max_nonfinite=4)
    with pytest.raises(LaunchError, match="number 4 in a row"):
        world.run(1, meets_nan, job, tuple(range(4, 12)), 0)
    last = newest(tmp_path / "checkpoints")
    assert last is not None
    assert last.name == "step-00000006"
    assert is_finite(last)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    job = tiny(tmp_path, MLP, train__max_nonfinite=100, train__check_replicas=None)
    with pytest.raises(LaunchError, match=r"weights are not finite after step 12: "):
        world.run(2, loses_a_weight, job)
    assert [path.name for path in checkpoints_of(tmp_path)] == ["step-00000003", "step-00000004"]


def test_a_job_that_ignores_them_saves_what_it_has(tmp_path: Path) -> None:
    meets_nan(tiny(tmp_path, MLP, train__nonfinite="ignore"), (4,), 0)
    last = newest(tmp_path / "checkpoints")
    assert last is not None
    assert not is_finite(last)
    assert metrics(tmp_path)[-1]["loss"] is None
