"""Plain PyTorch models of a few hundred parameters, and data for them, equal on every machine."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 21
BATCH = 8  # two whole batches an epoch, and one of 5 samples
CLASSES = 3
TOKENS = 7
LENGTH = 6


class Noise(nn.Module):
    """Set a tenth of the values to zero while training, by draws equal on every machine."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.1) if self.training else x


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.GELU(), nn.Linear(8, CLASSES))


def convolutional() -> nn.Module:
    first = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), Noise()]
    second = [nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*first, *second)


class Transformer(nn.Module):
    """Two layers of an encoder over tokens; logits of every token (batch, LENGTH, TOKENS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))  # type: ignore[no-any-return]


MODELS = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "transformer": Transformer,
}


class Parts(NamedTuple):
    """What a script has before it calls `prepare`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader


def made(model: str, optimizer: str, dtype: torch.dtype) -> Parts:
    """A model with weights between -0.3 and 0.3, its optimizer, and shuffled batches."""
    net = MODELS[model]().to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.6 * drawn - 0.3)
    return Parts(net, stepping(optimizer, net), DataLoader(data(model, dtype), BATCH, shuffle=True))


def stepping(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def data(model: str, dtype: torch.dtype) -> TensorDataset:
    """SAMPLES pairs: images and their classes, or tokens and the same tokens one place on."""
    generator = torch.Generator().manual_seed(6)
    if model == "transformer":
        text = torch.randint(TOKENS, (SAMPLES, LENGTH + 1), generator=generator)
        return TensorDataset(text[:, :-1], text[:, 1:])
    images = 2 * torch.rand(SAMPLES, 1, 6, 6, generator=generator, dtype=torch.float64) - 1
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return TensorDataset(images.to(dtype), labels)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all that has a target."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
