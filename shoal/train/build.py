"""From a job to the things that a loop needs. Each is made by the one function that knows how."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

from shoal import data, models
from shoal.config.job import Job
from shoal.data.mixing import mix_dataset
from shoal.data.source import Source
from shoal.data.warm_start import WarmStart
from shoal.errors import ConfigError
from shoal.train import plugins
from shoal.train.shm_check import free_shared_bytes, refuse_little_shared_memory
from shoal.train.task import Task
from shoal.train.weights import load_weights


@dataclass(frozen=True)
class Components:
    """What a job describes, on this rank's device and before any strategy."""

    source: Source
    task: Task
    model: nn.Module
    train_loader: DataLoader
    validation_loader: DataLoader
    notes: list[str]
    """What was done to the weights that the job starts from, for people."""


def build(job: Job, device: torch.device) -> Components:
    """Raises ConfigError or DataError; nothing has been written or trained by then."""
    registered = plugins.load(job.imports)
    source = data.load(job.data, job.seed, registered.data)
    _refuse_what_text_cannot(job, source)
    refuse_little_shared_memory(job, source, free_shared_bytes())
    task = Task(source.task, source.num_classes, job.evaluation.topk, job.train.label_smoothing)
    model = models.build(
        job.model.name, source.num_classes, source.input_shape, job.model.options, registered.models
    )
    if job.train.precision == "fp64":
        model = model.double()  # before it gets weights, which may be float64
    notes = (
        [] if job.model.weights is None else load_weights(model, job.model.weights, job.model.name)
    )
    model = _to_device(job, model, device)
    return Components(
        source, task, model, _train_loader(job, source), _validation_loader(job, source), notes
    )


def _to_device(job: Job, model: nn.Module, device: torch.device) -> nn.Module:
    if job.model.sync_batchnorm:
        if device.type != "cuda":
            raise ConfigError(
                ["model.sync_batchnorm: needs CUDA; on the CPU use a model with GroupNorm."]
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if job.model.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_forward_pre_hook(partial(_as_input, job))
    return model.to(device)


def _as_input(job: Job, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs in the precision and memory format that the model computes in, in training and in
    evaluation.
    """
    if job.train.precision == "fp64":
        inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    if job.model.channels_last:
        inputs = tuple(
            x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs
        )
    return inputs


def _train_loader(job: Job, source: Source) -> DataLoader:
    dataset: Any = source.train
    if job.train.mixup or job.train.cutmix:
        dataset = mix_dataset(dataset, source.num_classes, job.train.mixup, job.train.cutmix)
    warm = job.train.warm_start
    sampler: Sampler = (
        WarmStart(len(dataset), warm.epochs, warm.fraction, job.seed)
        if warm.epochs
        else RandomSampler(dataset)
    )
    return DataLoader(
        dataset,
        job.train.batch_size,
        sampler=sampler,
        drop_last=job.train.drop_last,
        **_worker_arguments(job),
    )


def _validation_loader(job: Job, source: Source) -> DataLoader:
    return DataLoader(source.validation, job.evaluation.batch_size, **_worker_arguments(job))


def _worker_arguments(job: Job) -> dict[str, Any]:
    workers = job.data.workers
    return {
        "num_workers": workers,
        # A data set of an --import file cannot be sent to a fresh interpreter by name; a fork has
        # it.
        "multiprocessing_context": "fork" if workers and sys.platform == "linux" else None,
        "persistent_workers": workers > 0,
        "pin_memory": job.data.pin_memory and torch.cuda.is_available(),
    }


def _refuse_what_text_cannot(job: Job, source: Source) -> None:
    if source.task == "language" and (job.train.mixup or job.train.cutmix):
        raise ConfigError(
            [f"train.mixup, train.cutmix: {job.data.name} is text; only images can be mixed."]
        )
