"""Jobs that are not trained: `shoal eval` of a checkpoint, and `shoal verify` of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.checkpoint import Checkpoints, Which
from shoal.checkpoint.tensor_files import no_layout
from shoal.config.job import Job
from shoal.errors import CheckpointError
from shoal.run import Run, init_with_place
from shoal.run.ema import Ema
from shoal.run.supervised import supervised
from shoal.strategies import StrategyLine
from shoal.train import optimizer as optimizers
from shoal.train.build import Components, build
from shoal.train.console import warn
from shoal.train.run_directory import job_of
from shoal.verification import Experiment, Verdict, verify_job


def evaluate_run(
    directory: Path, which: Which, strategy: str | None = None
) -> tuple[int, dict[str, float | int]]:
    """Evaluate one checkpoint on every validation sample. Collective.

    Args: strategy: by which the model is divided among ranks; None for whole models on all.

    Returns: this rank, and `top1`, `top5` (percent), `loss` (nats), `samples`, `step`: equal for
        any number of ranks.
    Raises:
        ConfigError: `directory` is no run directory.
        CheckpointError: there is no checkpoint that verifies.
    """
    job = job_of(directory)
    run = init_with_place(strategy or "ddp", seed=job.seed, announce=lambda _: None)
    built = build(job, run.device)
    ema: Ema | None = None
    if strategy is not None:
        # It takes no step, and some optimizers cannot step shards.
        config = replace(job.optimizer, name="SGD", nesterov=False, options={})
        optimizer = optimizers.build(config, built.model, job.train.batch_size)
        run.prepare(built.model, optimizer)
        ema = run.ema(job.train.ema) if job.train.ema else None
    layout = no_layout if strategy is None else run.layout_of()
    saved = Checkpoints(directory / "checkpoints").load(warn, which=which, like=layout)
    if saved is None:
        raise CheckpointError(
            f"{directory} has no checkpoint yet. Train it first: shoal train {job.name}"
        )
    if strategy is not None:
        weights = {n: v for n, v in saved.tensors.items() if not n.startswith("optimizer.")}
        run.load_state(weights, {**saved.info, "optimizer": {}}, {})
    else:
        built.model.load_state_dict(_begins_with("model.", saved.tensors))
        if job.train.ema:  # of parameters alone, and of a tied one once
            built.model.load_state_dict(_begins_with("ema.", saved.tensors), strict=False)
    with nullcontext() if ema is None else ema.in_place():
        return _measured(run, built, step=saved.step)


def evaluate_weights(job: Job) -> tuple[int, dict[str, float | int]]:
    """Evaluate the weights that `job` starts from on every validation sample. Collective.

    Returns: as `evaluate_run`, without `step`.
    Raises:
        ConfigError: the weights do not fit, or the data or the model cannot be built.
    """
    run = init_with_place("ddp", seed=job.seed, announce=lambda _: None)
    return _measured(run, build(job, run.device))


def _measured(run: Run, built: Components, **more: int) -> tuple[int, dict[str, float | int]]:
    measures = supervised(built.task.measures, built.model)
    sums = run.evaluate(measures, built.validation_loader, built.model)
    return run.rank, {**built.task.report(sums), **more}


def _begins_with(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


def verify_config(
    job: Job, line: StrategyLine, ranks: int, steps: int, tolerance: float
) -> Verdict:
    """Train `job`'s model on its data, in float64 by SGD, on `ranks` processes and on one.

    Model and data have their full size.

    Raises:
        ConfigError, DataError: the job cannot be built.
        LaunchError: a rank failed.
    """
    in_fp64 = replace(job, train=replace(job.train, precision="fp64"))
    components = _LazyComponents(in_fp64)
    experiment = Experiment(components.model, components.loader, components.loss, steps)
    return verify_job(experiment, line, ranks, accumulate=job.train.accumulate, tolerance=tolerance)


@dataclass(frozen=True)
class _LazyComponents:
    """The components of a job, built once in each process that needs them.

    Ranks get a pickle of this object, and not of model and data.
    """

    job: Job

    @cached_property
    def built(self) -> Components:
        return build(self.job, torch.device("cpu"))

    def model(self) -> nn.Module:
        return self.built.model

    def loader(self) -> DataLoader:
        return self.built.train_loader

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.built.task.loss(output, target)
