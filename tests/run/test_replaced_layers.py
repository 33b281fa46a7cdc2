"""A layer that a script puts in the place of another one, between two calls of `prepare`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world
from tests.harness.in_turn import in_turn

QUIET: dict[str, Any] = {"announce": lambda _: None, "precision": "fp64"}


def new_head(strategy: str) -> dict[str, Tensor]:
    """Train two steps with one head, and two with another one of more classes."""
    torch.manual_seed(0)
    run = shoal.init(strategy, **QUIET)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(12) % 4

    def step() -> None:
        optimizer.zero_grad()
        batch = run.share((x, y))
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *batch)
        optimizer.step()

    step()
    step()
    torch.manual_seed(2)
    model[2] = nn.Linear(16, 6).double()
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step()
    step()
    return run.weights()


def test_a_layer_that_was_replaced_trains_with_the_optimizer_that_holds_it() -> None:
    torch.manual_seed(2)
    before = nn.Linear(16, 6).double().weight
    expected = new_head("single")
    assert (expected["2.weight"] - before).abs().max() > 1e-3
    for found in world.run(2, new_head, "ddp"):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def refused(strategy: str) -> str:
    with pytest.raises(StrategyRefused) as error:
        new_head(strategy)
    return str(error.value)


def test_a_layer_that_was_replaced_where_models_are_divided_is_refused_with_cures() -> None:
    for errors in world.run(2, in_turn, refused, ("zero1",), ("server=1",), ("pipeline=2",)):
        for error in errors:
            assert "other parameters are trained than in the first prepare" in error
            assert "run.save(path)" in error
