"""A script for several hosts, whose last rank does not come to step 5."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

run = shoal.init("ddp", announce=lambda _: None)
data = TensorDataset(torch.randn(96, 4), torch.zeros(96, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))


def sleeps_in_its_step() -> None:
    time.sleep(1000)


def compute_loss(inputs: Tensor, target: Tensor) -> Tensor:
    if step == 5 and run.rank == run.world_size - 1:
        sleeps_in_its_step()
    return (model(inputs) - target).square().mean()


for step, (inputs, target) in enumerate(loader):  # noqa: B007 - compute_loss reads it
    optimizer.zero_grad()
    run.forward_backward(compute_loss, inputs, target)
    optimizer.step()
