"""A list of parameters that a script has taken before `run.prepare` is one of those after it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError
from shoal.testing import world
from tests.harness.in_turn import in_turn


def trained(strategy: str, averages: bool = False) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train with the old list: clip, scale and bound by it, and look at what it holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    parameters = [*model.parameters()]
    whole = copy.deepcopy(parameters)
    data = TensorDataset(torch.randn(24, 5).double(), torch.arange(24) % 3)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    run = shoal.init(strategy, announce=lambda _: None)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        run.backward(F.cross_entropy(model(x), y))
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(3)
        seen.append(nn.utils.clip_grad_norm_(parameters, 0.5).clone())
        optimizer.step()
        with torch.no_grad():
            parameters[0].clamp_(-0.3, 0.3)
            seen += [norm_of(parameter) for parameter in parameters]
            if averages:
                whole[0].mul_(0.5).add_(parameters[0], alpha=0.5)
    return run.weights(), seen


def norm_of(parameter: Tensor) -> Tensor:
    """Return the norm on each rank; torch 2.11 leaves that of a shard in parts."""
    norm = parameter.norm()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm.clone()


STRATEGIES = ("zero1", "zero2", "zero3", "tensor=2")


@pytest.mark.parametrize("strategies", [STRATEGIES], ids=", ".join)
def test_a_list_of_before_clips_and_bounds_as_on_one_device(
    strategies: tuple[str, ...],
) -> None:
    weights, seen = trained("single")
    for found, found_seen in world.run(2, in_turn, trained, *((s,) for s in strategies))[0]:
        torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found_seen, seen, rtol=1e-10, atol=1e-12)


def test_an_average_of_whole_and_divided_parameters_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"was combined with a whole tensor.*run\.weights\(\)"):
        world.run(2, trained, "zero3", True)
