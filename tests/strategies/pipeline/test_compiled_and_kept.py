"""Compiled layers in a pipeline run uncompiled; what a block keeps in an attribute is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world


class Keeping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x).tanh()
        self.balance = result.square().mean()
        return result


def trained(strategy: str, compiled: bool, uses_kept: bool) -> list[float]:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(*(Keeping(6, 6) for _ in range(4))).double()
    x = torch.randn(8, 6).double()
    if compiled:
        model[1].compile(backend="eager")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def compute_loss(x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        return loss + sum(layer.balance for layer in model) if uses_kept else loss

    losses = []
    for _ in range(3):
        losses.append(run.forward_backward(compute_loss, *run.share((x,))).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_stages() -> tuple[list[float], str]:
    losses = trained("pipeline=2", compiled=True, uses_kept=False)
    with pytest.raises(StrategyRefused) as caught:
        trained("pipeline=2", compiled=False, uses_kept=True)
    return losses, str(caught.value)


@pytest.mark.slow
def test_stages_take_compiled_layers_and_refuse_kept_values() -> None:
    expected: Any = trained("single", compiled=False, uses_kept=False)
    for losses, refusal in world.run(2, in_stages):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert "Return it from the block" in refusal
