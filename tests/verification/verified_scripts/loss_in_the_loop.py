"""A loop that computes its loss itself and calls `run.backward`; with the word "weights" it is
weighted by classes, which is no mean over samples; with "ranks" too it is the mean of the ranks."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
run = shoal.init()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(22, 8), torch.randint(0, 4, (22,)))
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = run.prepare(model, optimizer, loader)
weights = torch.tensor([1.0, 5.0, 1.0, 20.0]) if "weights" in sys.argv else None
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y, weight=None if weights is None else weights.to(x))
    run.backward(loss, reduction="ranks" if "ranks" in sys.argv else "rows")
    optimizer.step()
