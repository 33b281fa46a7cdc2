"""A loop with Accelerate; "mean of means" averages each rank's mean over its own tokens."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randint(0, 10, (32, 5)), torch.randint(0, 10, (32, 5))
y[torch.rand(32, 5) < 0.4] = -100
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    count = (y != -100).sum()
    if sys.argv[1] == "mean of means":
        loss = losses / count
    else:
        loss = losses * accelerator.num_processes / accelerator.reduce(count, "sum")
    accelerator.backward(loss)
    optimizer.step()
