"""Worlds of ranks with a GPU each, and the loop by which their numbers are judged.

`SHOAL_GPU_TESTS_ON=cpu` runs the same bodies on the CPU, where they make sense: it shows that the
tests themselves are right on a machine without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.models import build
from shoal.run.supervised import supervised
from shoal.testing import world

ON = os.environ.get("SHOAL_GPU_TESTS_ON", "cuda")
STEPS, BATCH = 4, 8
T = TypeVar("T")


def require(devices: int) -> None:
    """Skip the test where there are too few CUDA devices, with their number."""
    count = torch.cuda.device_count()
    if ON == "cuda" and count < devices:
        pytest.skip(f"needs {devices} CUDA devices; this machine has {count}")


def require_cuda(why: str) -> None:
    """Skip a test that has no meaning on the CPU."""
    require(1)
    if ON != "cuda":
        pytest.skip(f"means nothing on the CPU: {why}")


def on_ranks(ranks: int, function: Callable[..., T], *args: Any, devices: int | None = None) -> T:
    """Call a function on ranks with a device each. Return the result of rank 0."""
    require(ranks if devices is None else devices)
    results = world.run(ranks, function, *args, timeout_s=300, gpus=ON == "cuda")
    return results[0]


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def tiny_gpt() -> nn.Module:
    options = {"layers": 2, "width": 16, "heads": 2}
    return build("gpt", num_classes=18, input_shape=(12,), options=options)


MODELS = {"perceptron": perceptron, "convolutions": convolutions, "normed": normed, "gpt": tiny_gpt}


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().to(dtype)


def samples(name: str, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    rows = STEPS * BATCH
    if name == "gpt":
        x = torch.randint(0, 18, (rows, 12), generator=generator)
        return TensorDataset(x, x.roll(-1, dims=1))
    x = torch.randn(rows, 12, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 4, (rows,), generator=generator))


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class Trained(NamedTuple):
    """The result of a few steps, on the CPU."""

    losses: list[float]
    weights: dict[str, Tensor]
    device: str


def by_hand(
    name: str, dtype: torch.dtype = torch.float64, nudge: float = 0.0, sgd: bool = True
) -> Trained:
    """Train by a plain loop on the CPU.

    Args: nudge: relative change of the first weights, to see what rounding does to the last ones.
    """
    model = make(name, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge * torch.sign(torch.randn_like(parameter)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in DataLoader(samples(name, dtype), BATCH):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {n: v.detach().clone() for n, v in model.state_dict().items()}, "cpu")


def by_strategy(
    name: str, strategy: str, dtype: torch.dtype = torch.float64, settings: Any = None
) -> Trained:
    """Train by a strategy, on this rank's device."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    run = shoal.init(strategy, announce=lambda _: None, **(settings or {}))
    assert run.device.type == ON
    model = make(name, dtype).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples(name, dtype), BATCH, pin_memory=ON == "cuda")
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        losses.append(run.forward_backward(supervised(loss_of, model), x, y))
        optimizer.step()
    weights = {key: value.cpu() for key, value in run.weights().items()}
    return Trained([loss.item() for loss in losses], weights, str(run.device))


def distance(a: Trained, b: Trained) -> float:
    """Return the largest difference of losses and weights, relative to the largest of a tensor.

    The bias of an attention's keys has no influence; its values are rounding alone.
    """
    assert a.weights.keys() == b.weights.keys()
    pairs = [(torch.tensor(a.losses), torch.tensor(b.losses))]
    pairs += [(a.weights[key], b.weights[key]) for key in a.weights]
    return max(
        ((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-3)).item()
        for x, y in pairs
    )
