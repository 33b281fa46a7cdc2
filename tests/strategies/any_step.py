"""What steps of any shape are tried with: batches, losses, and the comparison of weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUIET: dict[str, Any] = {"announce": lambda _: None, "precision": "fp64"}


class Net(nn.Module):
    """Blocks, which are units, between two layers and a scalar, which are in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encode(x))
        return scores


def twice(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """R-Drop: two calls, of which the second sees other inputs."""
    first, second = net(x), net(x.flip(1))
    return F.cross_entropy(first, y) + F.mse_loss(first, second)


def some(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """One unit only, twice, and no call of the model; the others have no gradient."""
    hidden = net.blocks[1](net.blocks[1](net.stem(x)))
    return F.cross_entropy(net.head(hidden), y)


def penalised(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradient penalty: a gradient of a gradient, and a call of the model after it."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return F.cross_entropy(net(x), y) + gradient.square().sum(1).mean()


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(14, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (14,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=5)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], of: str = "") -> None:
    """Compare weights by name, to 1e-10 of the largest value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-10 * value.abs().max(), (of, name)
