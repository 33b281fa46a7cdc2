"""`shoal eval`: evaluate a checkpoint of a run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from shoal.checkpoint import Checkpoints
from shoal.config.job import Job
from shoal.errors import CheckpointError
from shoal.run import init_with_place
from shoal.run.supervised import supervised
from shoal.train.build import build
from shoal.train.console import warn
from shoal.train.run_directory import job_of


def evaluate_run(
    directory: Path, which: Literal["latest", "best"]
) -> tuple[int, dict[str, float | int]]:
    """Evaluate one checkpoint on every validation sample. Collective.

    Returns: this rank, and `top1`, `top5` (percent), `loss` (nats), `samples`, `step`: equal for
        any number of ranks.
    Raises:
        ConfigError: `directory` is no run directory.
        CheckpointError: there is no checkpoint that verifies.
    """
    job = job_of(directory)
    run = init_with_place("ddp", seed=job.seed, announce=_ignore)
    built = build(job, run.device)
    saved = Checkpoints(directory / "checkpoints").load(warn, which=which)
    if saved is None:
        raise CheckpointError(
            f"{directory} has no checkpoint yet. Train it first: shoal train {job.name}"
        )
    built.model.load_state_dict(_begins_with("model.", saved.tensors))
    if job.train.ema:  # of parameters alone, and of a tied one once
        built.model.load_state_dict(_begins_with("ema.", saved.tensors), strict=False)
    sums = run.evaluate(
        supervised(built.task.measures, built.model), built.validation_loader, built.model
    )
    return run.rank, {**built.task.report(sums), "step": saved.step}


def evaluate_weights(job: Job) -> tuple[int, dict[str, float | int]]:
    """Evaluate the weights that `job` starts from on every validation sample. Collective.

    Returns: as `evaluate_run`, without `step`.
    Raises:
        ConfigError: the weights do not fit, or the data or the model cannot be built.
    """
    run = init_with_place("ddp", seed=job.seed, announce=_ignore)
    built = build(job, run.device)
    measures = supervised(built.task.measures, built.model)
    sums = run.evaluate(measures, built.validation_loader, built.model)
    return run.rank, built.task.report(sums)


def _begins_with(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


def _ignore(_: str) -> None:
    """Print nothing: an evaluation has no global batch to describe."""
