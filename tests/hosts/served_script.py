"""Trains by servers as one process does; waits before a step while there is a file `wait`."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.launch.private_memory import read_secret

LR, STEPS = 0.1, 3
torch.manual_seed(0)
X, Y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
INITIAL = torch.randn(3, 5, dtype=torch.float64)


def new_model() -> nn.Linear:
    model = nn.Linear(5, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(INITIAL)
    return model


def served(run: shoal.Run) -> Tensor:
    model = new_model()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    for step in range(STEPS):
        if step == 2:
            wait_for_test(run)
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: nn.functional.mse_loss(model(x), y), *run.share((X, Y)))
        optimizer.step()
    return run.weights()["weight"]


def wait_for_test(run: shoal.Run) -> None:
    if run.rank == 0 and Path("wait").exists():
        pool: Any = run._local_model().remote_optimizer.launcher.pool
        for shard in range(pool.job.shards):  # a host that begins late has its replicas later
            pool.watcher.wait_for_view(shard, 20, lambda v: len(v.backups) + 1 == pool.job.replicas)
        Path("secret.part").write_bytes(read_secret() or b"")
        Path("secret.part").rename("secret")
    while Path("wait").exists():
        time.sleep(0.02)


def alone() -> Tensor:
    weight = INITIAL.clone().requires_grad_()
    for _ in range(STEPS):
        (gradient,) = torch.autograd.grad(nn.functional.mse_loss(X @ weight.T, Y), weight)
        weight = (weight - LR * gradient).detach().requires_grad_()
    return weight


run = shoal.init(os.environ.get("STRATEGY", "server=1"), precision="fp64", announce=lambda _: None)
weight = served(run)
if run.rank == 0:
    assert torch.allclose(weight, alone(), rtol=0, atol=1e-12)
    print("is the model of one process")
