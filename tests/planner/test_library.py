"""`shoal.plan` for a model of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.errors import ConfigError, UsageError


def small() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, lambda x, y: F.cross_entropy(model(x), y)


SAMPLE = (torch.zeros(8, 16), torch.zeros(8, dtype=torch.long))


def test_a_plan_has_a_best_line_and_a_table() -> None:
    model, optimizer, loss = small()
    before = [p.detach().clone() for p in model.parameters()]
    found = shoal.plan(model, optimizer, SAMPLE, loss, ranks=2, machine="h100")
    assert found.best is not None
    assert f"--strategy {found.best.strategy}" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_momentum_is_a_state_as_large_as_the_parameters() -> None:
    model, optimizer, loss = small()
    best = shoal.plan(model, optimizer, SAMPLE, loss, machine="h100").best
    assert best is not None
    assert best.memory.optimizer == sum(p.nbytes for p in model.parameters())


def test_a_model_on_the_meta_device_is_planned() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 16, 1 << 16)
    optimizer = torch.optim.AdamW(model.parameters())
    sample = (torch.zeros(4, 1 << 16, device="meta"),)
    found = shoal.plan(
        model, optimizer, sample, lambda x: model(x).mean(), ranks=2, memory="16GiB", machine="h100"
    )
    assert found.best is None  # 17 GB of weights, and three times as much beside them
    assert "nothing fits" in str(found)


def test_bad_arguments_are_one_error() -> None:
    model, optimizer, loss = small()
    with pytest.raises(ConfigError) as error:
        shoal.plan(model, optimizer, SAMPLE, loss, ranks=0, memory="much")
    assert "memory=much" in str(error.value)
    assert "ranks=0" in str(error.value)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _, loss = small()
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1)
    with pytest.raises(UsageError, match="not the model's"):
        shoal.plan(model, other, SAMPLE, loss, machine="h100")


class _AroundAnother(torch.optim.SGD):
    """An optimizer with an argument that is in none of its groups, as SAM has."""

    def __init__(self, parameters: Any, base: type) -> None:
        super().__init__(parameters, lr=0.1)


def test_an_optimizer_that_its_groups_do_not_make_is_refused_with_its_name() -> None:
    model, _, loss = small()
    optimizer = _AroundAnother(model.parameters(), torch.optim.SGD)
    with pytest.raises(UsageError, match="_AroundAnother cannot be made from its groups"):
        shoal.plan(model, optimizer, SAMPLE, loss, machine="h100")
