"""Whole parameters leave a rank's memory when a strategy has divided them."""

import gc
import weakref

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import world


def held_after_two_steps(strategy: str) -> list[str]:
    """Return the names of former parameters that something on this rank still refers to."""
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    former = {name: weakref.ref(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    for _ in range(2):
        x = torch.randn(4, 16)
        run.forward_backward(lambda x: model(x).square().mean(), x)
        optimizer.step()
    gc.collect()
    kept = {id(parameter) for parameter in model.parameters()}
    return [name for name, p in former.items() if p() is not None and id(p()) not in kept]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("zero3", 2),
        ("zero3,offload=true", 1),
        pytest.param("tensor=2", 2, marks=pytest.mark.slow),
        pytest.param("tensor=2,zero3", 4, marks=pytest.mark.slow),
        pytest.param("recompute,zero3", 2, marks=pytest.mark.slow),
    ],
)
def test_no_former_parameter_is_held(strategy: str, ranks: int) -> None:
    assert world.run(ranks, held_after_two_steps, strategy) == [[]] * ranks
