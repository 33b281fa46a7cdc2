"""From a job to what a training loop needs: data, model, task and loaders.

`--plugin FILE` adds the user's own models and data sets, in dicts of a Python file:

    models = {"my_net": MyNet}      # called as MyNet(num_classes=..., input_shape=..., **options)
    data = {"my_data": load}        # called as load(config.data, seed) -> shoal.data.source.Source
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal import data, models
from shoal.config.job import Job
from shoal.data.loader import DistributedBatchLoader
from shoal.data.mixing import Mixed
from shoal.data.source import Source
from shoal.errors import ConfigError
from shoal.run import Run, init_with_place
from shoal.strategies.base import ComputeLoss
from shoal.train.optimizer import scaled_rate, set_learning_rate
from shoal.train.task import Task
from shoal.train.weights import load_weights
from shoal.weights import empty_weights

Registered = dict[str, dict[str, Callable[..., Any]]]
"""Models and data sets of a user's files by name, as `models` and `data`."""


@dataclass(frozen=True)
class Components:
    """All that a job describes, on this rank's device and before any strategy."""

    source: Source
    task: Task
    model: nn.Module
    train_loader: DataLoader
    validation_loader: DataLoader
    notes: list[str]
    """Sentences about weights that were rounded when they were loaded."""


def init_run(job: Job, announce: Callable[[str], None]) -> Run:
    """Join the other ranks of `job`, and set what is the same for all of this process. Collective.

    Args:
        announce: is called with each line of the startup summary, on rank 0 only.
    """
    if job.train.deterministic:
        # Without this variable cuBLAS refuses to be deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    run = init_with_place(
        job.strategy,
        seed=job.seed,
        accumulate=job.train.accumulate,
        precision=job.train.precision,
        compile=job.model.compile,
        sync_batchnorm=job.model.sync_batchnorm,
        draws=job.train.draws,
        nonfinite=job.train.nonfinite,
        max_nonfinite=job.train.max_nonfinite,
        trace=job.log.trace,
        trace_to=job.directory,
        announce=announce,
    )
    torch.use_deterministic_algorithms(job.train.deterministic)
    torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
    return run


def build(job: Job, device: torch.device) -> Components:
    """Build everything that `job` describes. Nothing is written or trained.

    Raises:
        ConfigError: a setting does not go with the model, the data or this machine.
        DataError: the data cannot be read.
    """
    registered = load_plugins(job.plugins)
    source = data.load(job.data, job.seed, registered["data"])
    dataset: Any = source.train
    if job.train.mixup or job.train.cutmix:
        if source.task == "language":
            raise ConfigError(
                f"train.mixup, train.cutmix: {job.data.name} is text; only images can be mixed."
            )
        dataset = Mixed(dataset, source.num_classes, job.train.mixup, job.train.cutmix)
    task = Task(source.task, source.num_classes, job.evaluation.topk, job.train.label_smoothing)
    with empty_weights() if job.model.empty else nullcontext():
        model = build_model(job, source, registered)
    if job.train.precision == "fp64":
        model = model.double()  # before it gets weights, which may be float64 too
    notes = []
    if job.model.weights is not None:
        notes = load_weights(model, job.model.weights)
    if job.model.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_forward_pre_hook(partial(_as_input, job))
    workers = _worker_arguments(job)
    train = DataLoader(
        dataset, job.train.batch_size, shuffle=True, drop_last=job.train.drop_last, **workers
    )
    validation = DataLoader(source.validation, job.evaluation.batch_size, **workers)
    return Components(source, task, model.to(device), train, validation, notes)


def build_model(job: Job, source: Source, registered: Registered) -> nn.Module:
    """Return the model that a job describes, for these data, with weights of its own."""
    return models.build(
        job.model.name,
        source.num_classes,
        source.input_shape,
        job.model.options,
        registered["models"],
    )


def describe(job: Job, built: Components, device: torch.device, total_steps: int) -> list[str]:
    """Return lines about model, data and settings, for the beginning of a run."""
    num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
    num_train = len(built.source.train)  # type: ignore[arg-type]
    num_validation = len(built.source.validation)  # type: ignore[arg-type]
    rate = scaled_rate(job.optimizer, job.train.batch_size)
    lines = [
        f"{job.model.name}, {num_parameters:,} parameters, on {job.data.name}: {num_train:,} "
        f"samples, {num_validation:,} to validate",
        f"{job.strategy}, {device.type}, {job.train.precision}; {job.optimizer.name}, learning "
        f"rate {rate:g}; {total_steps:,} steps in {Path(job.directory)}",
    ]
    if job.train.soft_targets:
        lines.append(f"training loss with {job.train.soft_targets}, validation loss without")
    return lines


def steps_of_epochs(job: Job, loader: DistributedBatchLoader) -> list[int]:
    """Return the optimizer steps of each epoch. Raise ConfigError if an epoch has none."""
    steps = [loader.batches_in(epoch) for epoch in range(job.train.epochs)]
    if 0 in steps:
        raise ConfigError(
            f"train.batch_size: {job.train.batch_size} is more than the data set holds, and "
            "train.drop_last leaves the rest out. Use a smaller batch, or "
            "train.drop_last=false."
        )
    return steps


def take_step(
    job: Job,
    run: Run,
    optimizer: Optimizer,
    compute_loss: ComputeLoss,
    batch: Any,
    factor: float,
) -> float:
    """Train on a batch, at a factor of the base rate. Collective. Return the learning rate."""
    inputs, target = batch
    rate = set_learning_rate(optimizer, factor)
    optimizer.zero_grad()
    run.forward_backward(compute_loss, inputs, target)
    if job.train.clip_norm is not None:
        run.clip_gradients(job.train.clip_norm)
    optimizer.step()
    return rate


def _as_input(job: Job, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return inputs in the dtype and memory format of the model. Runs before each forward pass."""
    if job.train.precision == "fp64":
        inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    if job.model.channels_last:
        inputs = tuple(
            x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs
        )
    return inputs


def _worker_arguments(job: Job) -> dict[str, Any]:
    workers = job.data.workers
    return {
        "num_workers": workers,
        # A new interpreter could not import a data set of a --plugin file by name. A fork has
        # it already.
        "multiprocessing_context": "fork" if workers and sys.platform == "linux" else None,
        "persistent_workers": workers > 0,
        "pin_memory": job.data.pin_memory and torch.cuda.is_available(),
    }


def load_plugins(files: Iterable[str]) -> Registered:
    """Run the files, which `job_precheck` has seen, and collect their `models` and `data`.

    Raises:
        ConfigError: a file does not exist, or imports what is not installed.
    """
    registered: Registered = {"models": {}, "data": {}}
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(f"--plugin {name}: there is no such file")
        # The prefix keeps a file from hiding a library's module of the same name.
        spec = importlib.util.spec_from_file_location(f"shoal_plugin_{Path(name).stem}", name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            raise ConfigError(f"--plugin {name}: {error}") from error
        for kind, found in registered.items():
            found.update(getattr(module, kind, {}))
    return registered
