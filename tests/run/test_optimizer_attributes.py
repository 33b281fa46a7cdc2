"""Optimizers that keep tensors beside their groups and state are refused where they would err."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world


class ByPosition(Optimizer):
    """Keeps the momentum of each parameter in a list, in the order of parameters."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momentum = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter, momentum in zip(self.param_groups[0]["params"], self.momentum, strict=False):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=0.1)


class OwnList(Optimizer):
    """Steps a list of parameters that it made when it was built."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.params = [*self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.params:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


X = torch.arange(16.0, dtype=torch.float64).sin().reshape(4, 4)


def plain(kind: type[Optimizer]) -> dict[str, Tensor]:
    model = net()
    optimizer = kind(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def trained(strategies: list[str]) -> list[str]:
    found = []
    for strategy in strategies:
        for kind in (ByPosition, OwnList):
            run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
            model = net()
            try:
                model, optimizer = run.prepare(model, kind(model.parameters()))
                for _ in range(3):
                    optimizer.zero_grad()
                    loss = lambda x, model=model: model(x).square().mean()  # noqa: E731
                    run.forward_backward(loss, run.share(X))
                    optimizer.step()
            except StrategyRefused as error:
                found.append(str(error))
                continue
            expected = plain(kind)
            torch.testing.assert_close(run.weights(), expected, rtol=1e-10, atol=1e-12)
            found.append("exact")
    return found


def test_tensors_in_attributes_are_refused_where_parameters_are_replaced() -> None:
    for found in world.run(2, trained, ["ddp", "zero3", "pipeline=2"]):
        assert found[:2] == ["exact"] * 2
        for by_position, own_list in (found[2:4], found[4:6]):
            assert "a tensor for each parameter in an attribute of its own" in by_position
            assert "'momentum'" in by_position
            assert "in an attribute of its own, 'params'" in own_list


def refusals(strategies: list[str]) -> list[str]:
    found = []
    for strategy in strategies:
        run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
        model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4)).double()
        try:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except StrategyRefused as error:
            found.append(str(error))
    return found


def test_an_embedding_that_writes_its_weight_in_the_forward_pass_is_refused() -> None:
    for found in world.run(2, refusals, ["ddp", "zero3"]):
        assert len(found) == 2
        assert all("0: max_norm writes into its weight" in text for text in found)
