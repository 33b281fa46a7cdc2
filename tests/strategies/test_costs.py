"""Every registered strategy tells its costs, and these keep what must be kept."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.costs.cluster import one_host
from shoal.costs.machine import UNKNOWN_CPU
from shoal.costs.memory_peak import peak
from shoal.errors import StrategyRefused
from shoal.models import build
from shoal.planner.strategy_search import Planner, Workload
from shoal.planner.trace_model import trace_model
from shoal.strategies import STRATEGIES
from shoal.strategies.base import Strategy
from shoal.strategies.pipeline.schedules import table

GIB = 2**30


@pytest.fixture(scope="module")
def workload() -> Workload:
    model = build("gpt", 64, (16,), {"width": 32, "layers": 4, "heads": 4})

    def loss(x: Any, y: Any) -> Any:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def make(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters())

    tokens = torch.zeros(1, 16, dtype=torch.long)
    return Workload(trace_model(model, loss, make, (tokens, tokens)), model, 16)


def planner(workload: Workload, ranks: int) -> Planner:
    return Planner(workload, UNKNOWN_CPU, one_host(ranks, 64.0 * GIB))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_registered_strategy_tells_its_costs(name: str) -> None:
    file, _, owner = STRATEGIES[name].class_path.partition(":")
    strategy = getattr(import_module(f"shoal.strategies.{file}"), owner)
    assert strategy.cost is not Strategy.cost, f"{owner} has no method `cost`"


def test_a_strategy_without_costs_says_so(workload: Workload) -> None:
    class Silent(Strategy):
        def apply(self, model: Any, mesh: Any) -> Any:
            return model

    with pytest.raises(StrategyRefused, match="Silent does not tell its costs"):
        Silent().cost(planner(workload, 1).step_cost("single"))


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("ddp", 2),
        ("zero1", 4),
        ("zero3", 4),
        ("tensor=2", 4),
        ("pipeline=2", 4),
        ("pipeline=2,schedule=zbv", 2),
        ("pipeline=2,tensor=2,zero1", 8),
        ("recompute,zero3", 2),
        ("server=1", 2),
    ],
)
def test_no_operation_and_no_parameter_is_lost(workload: Workload, line: str, ranks: int) -> None:
    step = planner(workload, ranks).step_cost(line)
    held = [p.name for segment in step.segments for p in segment.parameters]
    names = [p.name for p in workload.model.parameters]
    # The head is the embedding: a copy of it where they lie on two ranks.
    is_apart = "pipeline" in line and "zbv" not in line
    assert sorted(held) == sorted([*names, *["token_embedding.weight"] * is_apart])
    assert [segment.work for segment in step.segments][: len(workload.model.segments)] == [
        *workload.model.segments
    ]


def test_zero_divides_states_by_the_ranks(workload: Workload) -> None:
    whole = peak(planner(workload, 4).step_cost("ddp"))
    for line in ("zero1", "zero3"):
        shards = peak(planner(workload, 4).step_cost(line))
        assert shards.parameters == pytest.approx(whole.parameters / 4, rel=1e-3)
        assert shards.optimizer == pytest.approx(whole.optimizer / 4, rel=1e-3)


def test_bytes_sent_are_those_of_the_papers(workload: Workload) -> None:
    n = 4
    size = 4.0 * sum(p.numel for p in workload.model.parameters)
    sent = {line: planner(workload, n).step_cost(line).sent_bytes() for line in ("ddp", "zero3")}
    assert sent["ddp"] == pytest.approx(2 * (n - 1) / n * size, rel=0.01)  # and 16 totals
    root = size - sum(
        4.0 * p.numel for p in workload.model.parameters if p.name.startswith("blocks.")
    )
    # What is in no unit is gathered once, units twice.
    assert sent["zero3"] == pytest.approx((n - 1) / n * (3 * size - root), rel=1e-6)


def test_a_pipeline_has_the_rows_of_its_schedule(workload: Workload) -> None:
    step = planner(workload, 2).step_cost("pipeline=2,microbatches=4")
    assert [len(row) for row in step.rows] == [len(row) for row in table("1f1b", 2, 4).rows]
    assert {segment.stage for segment in step.segments} == {0, 1}


def test_a_refusal_is_the_strategys_own(workload: Workload) -> None:
    with pytest.raises(StrategyRefused, match="batch 16 cannot be cut for 32 ranks"):
        planner(workload, 32).step_cost("ddp")
    with pytest.raises(StrategyRefused, match="replicas, staleness and compress of servers"):
        planner(workload, 4).step_cost("server=2,replicas=2")
