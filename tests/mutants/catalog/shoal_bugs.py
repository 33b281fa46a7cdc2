"""Strategies of Shoal with an error, beside right ones, under `shoal.init`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from shoal.run.init import init_with_place
from tests.mutants.loop import IGNORED, Loop
from tests.mutants.mutant import OF_LOSS, harmless, planted

BROKEN = "tests.verification.broken_strategies"


class WithShoal(Loop):
    """A loop on Shoal; in one process the plain loop that it was made from."""

    strategy = "ddp"
    accumulate = 1
    shares = (4, 3)

    def data(self) -> TensorDataset:
        tokens, labels = super().data().tensors
        return TensorDataset(tokens, labels.masked_fill(labels == IGNORED, 0))

    def loader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=sum(self.shares))

    def train(self) -> None:
        torch.manual_seed(self.seed)
        self.model, loader = self.build(), self.loader()
        self.optimizer = self.make_optimizer()
        if self.peers.size == 1:
            for tokens, labels in loader:
                self.optimizer.zero_grad()
                self.loss(tokens, labels).backward()
                self.optimizer.step()
            return
        run = init_with_place(
            self.strategy,
            accumulate=self.accumulate,
            precision="fp64",
            announce=lambda _: None,
        )
        self.model, self.optimizer, loader = run.prepare(self.model, self.optimizer, loader)
        for tokens, labels in loader:
            self.optimizer.zero_grad()
            run.forward_backward(self.loss, tokens, labels)
            self.optimizer.step()

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over rows."""
        return F.cross_entropy(self.call(tokens).flatten(0, 1), labels.flatten())


@harmless("none: Shoal's ddp")
class ShoalDDP(WithShoal):
    pass


@harmless("none: Shoal's zero3")
class ShoalZero3(WithShoal):
    strategy = "zero3"


@harmless("none: Shoal's ddp with two micro-batches")
class ShoalAccumulates(WithShoal):
    accumulate = 2


@harmless("none: Shoal's pipeline")
class ShoalPipeline(WithShoal):
    strategy = "pipeline=2"


@planted(
    "a strategy of Shoal's kind weights losses by the number of ranks",
    module=(OF_LOSS, "head"),
    cause="scale",
)
class ShoalNotDivided(WithShoal):
    strategy = f"{BROKEN}:NotDivided"


@planted(
    "a strategy of Shoal's kind leaves one bias out of the average",
    module="head",
    cause="missing reduction",
)
class ShoalOneNotReduced(WithShoal):
    strategy = f"{BROKEN}:OneNotReduced"


@planted(
    "a strategy of Shoal's kind drops the samples of the last rank",
    module=(OF_LOSS, "head"),
    cause="weights of samples",
)
class ShoalShareDropped(WithShoal):
    strategy = f"{BROKEN}:ShareDropped"


@planted(
    "a strategy of Shoal's kind gives the optimizer copies of the parameters",
    module=("embed", "head"),
    cause=("not updated", "update"),
)
class ShoalStaleBinding(WithShoal):
    strategy = f"{BROKEN}:StaleBinding"
