"""A job, or a model of one's own, as a workload for the planner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from shoal import data
from shoal.config.job import Job
from shoal.errors import StrategyRefused
from shoal.planner.strategy_search import Workload
from shoal.planner.trace_model import trace_model
from shoal.platform.torch_private.fake_tensors import fake_tensors
from shoal.train import optimizer as job_optimizer
from shoal.train.build import build_model, load_plugins
from shoal.train.job_precheck import absent_files
from shoal.train.task import Task

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def with_samples(job: Job) -> tuple[Job, str]:
    """Return the job with random samples in place of images that are not here, and a note.

    A plan needs no more of them than their shape; of an image folder, as many classes as ImageNet.
    """
    if job.plugins or not (absent := absent_files(job)):  # a file may bring data of that name
        return job, ""
    side, classes = {"cifar10": (32, 10), "cifar100": (32, 100)}.get(
        job.data.name, (job.data.image_size, 1000)
    )
    note = f"{absent[0]}; the plan is for images of 3 x {side} x {side} in {classes} classes"
    data = replace(job.data, name="dummy", shape=(3, side, side), classes=classes)
    return replace(job, data=data), note


def job_workload(job: Job) -> Workload:
    """Count the work of a job's model. Reads one sample, and makes no weights.

    Raises: UsageError: the model cannot run without values.
    """
    if job.model.compile:
        raise StrategyRefused(
            "model.compile: what a compiled model costs is not known before it is compiled. Plan "
            "with --model.compile false."
        )
    registered = load_plugins(job.plugins)
    source = data.load(job.data, job.seed, registered["data"])
    sample: Any = source.train[0]
    batch = default_collate([sample])
    task = Task(source.task, source.num_classes, job.evaluation.topk, job.train.label_smoothing)
    with fake_tensors():
        model = build_model(job, source, registered)
    if job.train.precision == "fp64":
        model = model.double()
        batch = [x.double() if x.is_floating_point() else x for x in batch]
    compute_loss = in_precision(task.compute_loss(model), job.train.precision)

    def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return job_optimizer.build(job.optimizer, module, job.train.batch_size)

    work = trace_model(model, compute_loss, make_optimizer, tuple(batch), job.model.name)
    return Workload(work, model, job.train.batch_size, job.train.accumulate)


def in_precision(compute_loss: Callable[..., Any], precision: str) -> Callable[..., Any]:
    """Return the function as mixed precision runs it."""
    dtype = DTYPES.get(precision)

    def compute(*batch: Any) -> Any:
        context = torch.autocast("cpu", dtype) if dtype is not None else nullcontext()
        with context:
            return compute_loss(*batch)

    return compute
