"""Values that a script loads on some ranks only, where each rank keeps its own part of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from any_step import assert_same
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

X = torch.arange(24.0, dtype=torch.float64).sin().reshape(6, 4)


def trained(strategy: str, by_all: bool) -> tuple[str, dict[str, Tensor]]:
    """Go back to the beginning after two steps. Returns the error, and the weights after two more.

    Args: by_all: on all ranks, or on rank 0 alone.
    """
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    start = copy.deepcopy(model.state_dict())
    model, optimizer = run.prepare(model, optimizer)
    for step in range(4):
        if step == 2 and (by_all or run.rank == 0):
            model.load_state_dict(start)
        optimizer.zero_grad()
        run.forward_backward(lambda x: model(x).square().mean(), run.share(X))
        try:
            optimizer.step()
        except UsageError as error:
            return str(error), {}
    return "", run.weights()


LAYOUTS = ["ddp", "zero3", "tensor=2", "pipeline=2"]


def test_values_that_all_ranks_load_are_those_of_one_device() -> None:
    _, expected = trained("single", by_all=True)
    for found in world.run(2, in_turn, trained, *((strategy, True) for strategy in LAYOUTS)):
        for strategy, (error, weights) in zip(LAYOUTS, found, strict=True):
            assert error == "", strategy
            assert_same(weights, expected, strategy)


def test_values_that_one_rank_loads_are_refused_by_all() -> None:
    for found in world.run(2, in_turn, trained, *((strategy, False) for strategy in LAYOUTS)):
        for strategy, (error, _) in zip(LAYOUTS, found, strict=True):
            fact = "load_state_dict: rank 0 has loaded weights and rank 1 has not"
            assert error.startswith(fact), (strategy, error)
            assert "call load_state_dict on all ranks" in error
