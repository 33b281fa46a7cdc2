"""`shoal verify`: the proof for an experiment as it is described in its file."""

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
    """Train `job`'s model on its data, in float64 by SGD, on `ranks` processes and on one; nothing
    is shrunk.

    Raises: ConfigError, DataError, LaunchError.
    """
    plain = replace(job, train=replace(job.train, precision="fp64"))
    parts = _Parts(plain)
    experiment = Experiment(parts.model, parts.loader, parts.loss, steps)
    return verify_job(experiment, line, ranks, accumulate=job.train.accumulate, tolerance=tolerance)


@dataclass(frozen=True)
class _Parts:
    """What is built in each process, once."""

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
