"""The task: a model, its data and its optimizer, the same for every candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from shoal.config.job import DataConfig
from shoal.data import load
from shoal.platform.torchvision_import import torchvision

RANK_BATCH = 32  # samples that one rank computes in one step


@dataclass(frozen=True)
class Task:
    """One line of the benchmark."""

    name: str
    build: Callable[[], nn.Module]
    dataset: Dataset
    rounds: int  # of one epoch each

    def model(self) -> nn.Module:
        """The same initial values for everyone."""
        torch.manual_seed(0)
        return self.build()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD: Adam would hide a wrong gradient scale from the comparison of results."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mlp() -> Task:
    """As little work in a step as there may be: what is measured is nearly all overhead."""
    digits = load(DataConfig(name="digits"), seed=0).train
    rows = [digits[index] for index in range(len(digits))]
    images, labels = torch.stack([x for x, _ in rows]), torch.tensor([int(y) for _, y in rows])

    def layers() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    return Task("MLP 64-256-10", layers, TensorDataset(images, labels), rounds=80)


def cnn() -> Task:
    """A real network, as small as people train it; four steps an epoch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(256, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (256,), generator=generator)
    resnet = lambda: torchvision.models.resnet18(num_classes=10)  # noqa: E731
    return Task("ResNet-18, 32 x 32", resnet, TensorDataset(images, labels), rounds=15)
