"""A loop with Lightning Fabric; "not reduced" leaves the gradients as they are on each rank."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(32, 6), torch.randint(0, 4, (32,)))
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    wrong = sys.argv[1] == "not reduced"
    with fabric.no_backward_sync(model) if wrong else nullcontext():
        fabric.backward(F.cross_entropy(model(x), y))
    optimizer.step()
