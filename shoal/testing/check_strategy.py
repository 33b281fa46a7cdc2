"""The conformance check of a strategy: the gradients and the weights of one process, to 1e-10 in float64.

A strategy's author writes one row in a table and calls `check_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.data import DataLoader, Dataset

from shoal.proof import Experiment, prove
from shoal.strategies.base import LossFunction


@dataclass(frozen=True)
class Case:
    """One model with data and a loss. The functions stand at module level: every rank imports them."""

    model_fn: Callable[[], nn.Module]
    dataset_fn: Callable[[], Dataset]
    loss_fn: LossFunction
    batch_size: int = 10
    steps: int = 5

    def experiment(self) -> Experiment:
        """Its global batches are drawn from the data set in random order."""
        return Experiment(self.model_fn, partial(_loader, self.dataset_fn, self.batch_size), self.loss_fn, self.steps)


def check_strategy(strategy: str, ranks: int, case: Case, accumulate: int = 1) -> None:
    """Raise AssertionError with the worst tensors unless `ranks` ranks train as one process does, on every rank."""
    verdict = prove(case.experiment(), strategy, ranks, accumulate=accumulate, timeout_s=60.0)
    assert verdict.verdict == "exact", f"{strategy} on {ranks} ranks differs from one process:\n{verdict}"


def _loader(dataset_fn: Callable[[], Dataset], batch_size: int) -> DataLoader:
    return DataLoader(dataset_fn(), batch_size=batch_size, shuffle=True)
