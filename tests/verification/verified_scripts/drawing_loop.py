"""A loop that adds noise to its samples outside of `compute_loss`, drawn by torch or by NumPy."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
np.random.seed(0)
run = shoal.init()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 4, (48,)))
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 8))


def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def drawn_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.random.randn(*x.shape))


for x, y in loader:
    noise = torch.randn_like(x) if sys.argv[1] == "torch" else drawn_by_numpy(x)
    optimizer.zero_grad()
    run.forward_backward(compute_loss, x + 0.1 * noise, y)
    optimizer.step()
