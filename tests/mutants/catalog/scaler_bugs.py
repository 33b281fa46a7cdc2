"""Bugs of loss scaling, for which torch has a GradScaler."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.mutants.data_parallel import DataParallel
from tests.mutants.loop import Batch
from tests.mutants.mutant import OF_LOSS, harmless, planted


@harmless("none: losses scaled by a GradScaler")
class Scaled(DataParallel):
    """Data parallelism with scaled losses."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.first_scale())
        return super().make_optimizer()

    def first_scale(self) -> float:
        """Return the factor of the losses in the first step."""
        return 1024.0

    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        return self.scaler.scale(super().objective(batch, total))

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


@planted(
    "each rank has a loss scale of its own, and gradients are averaged before they are unscaled",
    module=(OF_LOSS, "head"),
    cause="missing reduction",
)
class ScalePerRank(Scaled):
    def first_scale(self) -> float:
        return super().first_scale() * (1 + self.peers.rank)


@planted(
    "gradients are unscaled by each rank's bucket and once more by the scaler",
    module="head",
    cause="scale",
)
class UnscaledTwice(Scaled):
    def average(self, flat: Tensor) -> Tensor:
        factor = 1.0 if self.peers.size == 1 else float(self.scaler.get_scale())
        return super().average(flat) / factor


@planted(
    "a rank clips gradients that are still scaled, the one process those that are not",
    module="head",
    cause=("scale", "wrong gradient"),
)
class ScaledClipping(Scaled):
    def clip(self) -> None:
        if self.peers.size == 1:
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.2)
