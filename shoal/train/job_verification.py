"""`shoal verify CONFIG`: compare a strategy with one device on the experiment of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.config.job import Job
from shoal.strategies import StrategyLine
from shoal.train.build import Components, build
from shoal.verification import Experiment, Verdict, verify_job


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
