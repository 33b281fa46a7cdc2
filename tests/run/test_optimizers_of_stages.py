"""Optimizers that look at all parameters together, where no rank has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world


class Normalised(torch.optim.Optimizer):
    """Divides all gradients by their common norm, as some clip inside of their step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for parameter in params:
            parameter.sub_(parameter.grad / norm, alpha=self.param_groups[0]["lr"])


def refusals(strategies: list[str]) -> list[str]:
    found = []
    for strategy in strategies:
        for kind in (Normalised, torch.optim.LBFGS):
            torch.manual_seed(0)
            run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
            net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
            data = DataLoader(TensorDataset(torch.randn(4, 4).double()), batch_size=4)
            net, _, batches = run.prepare(net, kind(net.parameters()), data)
            (batch,) = batches
            with pytest.raises(StrategyRefused) as caught:
                run.forward_backward(lambda x, net=net: F.mse_loss(net(x), x), *batch)
            found.append(str(caught.value))
    return found


def test_a_pipeline_refuses_an_optimizer_that_looks_at_all_parameters_together() -> None:
    for found in world.run(2, refusals, ["pipeline=2"]):
        for name, text in zip(("Normalised", "LBFGS"), found, strict=True):
            assert text.startswith(f"{name} cannot step the stages of a pipeline one by one")
            assert "Use ddp, or another optimizer" in text
