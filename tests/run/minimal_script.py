"""What the few lines of a script are given: a small model, an optimizer and a loader, and a
run that says nothing.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


def data(samples: int = 10) -> TensorDataset:
    """Rows of 4 numbers and one of 3 classes each, the same every time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def parts(
    model: nn.Module | None = None, batch_size: int = 4
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """A linear layer, or a model of one's own; SGD; shuffled batches."""
    model = model or nn.Linear(4, 3).double()
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def quiet() -> shoal.Run:
    return shoal.init(announce=lambda _: None)
