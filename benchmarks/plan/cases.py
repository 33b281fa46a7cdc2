"""Cases: models, strategies and numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.models import build

CLASSES = 64
"""Classes. Models are small: a step is short beside the time slices of a machine that is busy."""


class ModelCase(NamedTuple):
    """A model of `shoal.models`, the shape of a sample, its options, and the global batch."""

    name: str
    shape: tuple[int, ...]
    options: dict[str, Any]
    batch: int

    @property
    def is_text(self) -> bool:
        return len(self.shape) == 1


MODELS = {
    "mlp": ModelCase("mlp", (1, 28, 28), {"hidden": [384, 384]}, 64),
    "cnn": ModelCase("residual_cnn", (3, 16, 16), {"widths": [16, 32]}, 16),
    "gpt": ModelCase("gpt", (32,), {"width": 64, "layers": 4, "heads": 4}, 8),
    "lstm": ModelCase("lstm", (16,), {"width": 128, "layers": 2}, 16),
}
ON_ONE_HOST = ("mlp", "cnn", "gpt")


class PlannedCase(NamedTuple):
    """A model of `MODELS`, a strategy line, ranks and micro-batches of a rank's share."""

    model: str
    strategy: str
    ranks: int
    accumulate: int = 1

    @property
    def label(self) -> str:
        more = f" x {self.accumulate} accumulated" if self.accumulate > 1 else ""
        return f"{self.model} {self.strategy} {self.ranks}{more}"


EVERYWHERE = (
    ("single", 1),
    ("ddp", 2),
    ("zero1", 2),
    ("zero3", 2),
    ("server=1", 2),
    ("local=4", 2),
    ("ddp", 4),
)
CASES = (
    *(PlannedCase(model, line, ranks) for model in ON_ONE_HOST for line, ranks in EVERYWHERE),
    *(PlannedCase(model, "tensor=2", 2) for model in ON_ONE_HOST),
    *(PlannedCase(model, "pipeline=2", 2) for model in ON_ONE_HOST),
    *(PlannedCase(model, "recompute,ddp", 2) for model in ON_ONE_HOST),
    PlannedCase("gpt", "pipeline=2,schedule=gpipe", 2),
    PlannedCase("gpt", "pipeline=2,schedule=interleaved", 2),
    PlannedCase("gpt", "pipeline=2,schedule=zero-bubble", 2),
    PlannedCase("gpt", "tensor=2,ddp", 4),
    PlannedCase("gpt", "zero3", 4),
    PlannedCase("gpt", "ddp", 2, 2),
    PlannedCase("gpt", "zero1", 2, 2),
    PlannedCase("cnn", "zero3", 2, 2),
)


def model_of(case: PlannedCase) -> nn.Module:
    """Return the model of a case, with weights of a fixed seed."""
    torch.manual_seed(0)
    model = MODELS[case.model]
    return build(model.name, CLASSES, model.shape, model.options)


def samples_of(case: PlannedCase, number: int) -> TensorDataset:
    """Return random samples and targets."""
    model = MODELS[case.model]
    if model.is_text:
        tokens = torch.randint(0, CLASSES, (number, *model.shape))
        return TensorDataset(tokens, tokens)
    return TensorDataset(torch.randn(number, *model.shape), torch.randint(0, CLASSES, (number,)))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every case."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


ComputeLoss = Callable[..., Tensor]
