"""The memory that a plan predicts for the fullest rank is what tensors of real ranks hold."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from benchmarks.plan.cases import loss
from benchmarks.plan.measure import OwnPeak
from shoal.costs.cluster import Cluster, Host, Link, one_host
from shoal.costs.machine import UNKNOWN_CPU
from shoal.costs.memory_peak import peak
from shoal.models import build
from shoal.planner.strategy_search import Planner, Workload
from shoal.planner.trace_model import trace_model
from shoal.run.supervised import supervised
from shoal.testing import world
from tests.harness.process_tree import descendants

ROWS = 8
LINK = Link(1e9)


def gpt() -> nn.Module:
    """Return a model whose head is its embedding."""
    torch.manual_seed(0)
    return build("gpt", 64, (32,), {"width": 64, "layers": 4, "heads": 4})


def held_by_this_rank(strategy: str, accumulate: int) -> int:
    """Return the most bytes that tensors of a step hold on this rank."""
    run = shoal.init(strategy, accumulate=accumulate, announce=lambda _: None)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    tokens = torch.zeros(ROWS // run.mesh.data.size, 32, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        run.forward_backward(supervised(loss, model), tokens, tokens.clone())
        optimizer.step()

    for _ in range(2):
        step()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if run.mesh.pipeline.size > 1:  # the others are of other stages
        parameters = [p for p in parameters if dict.get(optimizer.state, p)]
    empty: dict[str, Tensor] = {}
    state = [
        value
        for parameter in parameters
        for value in dict.get(optimizer.state, parameter, empty).values()
        if isinstance(value, Tensor)
    ]
    with OwnPeak(parameters, state, run.device) as held:
        step()
    return held.peak_bytes


@cache
def planned(accumulate: int) -> Planner:
    """Return a planner of two ranks."""
    model = gpt()
    tokens = torch.zeros(1, 32, dtype=torch.long)
    work = trace_model(
        model,
        lambda x, y: loss(model(x), y),
        lambda module: torch.optim.AdamW(module.parameters()),
        (tokens, tokens),
    )
    return Planner(Workload(work, model, ROWS, accumulate), UNKNOWN_CPU, one_host(2, 2.0**40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        ("zero3", 1),
        ("zero1", 1),
        ("zero1", 2),
        ("pipeline=2,schedule=gpipe,cuts=blocks.2", 1),
        ("pipeline=2,schedule=zero-bubble,cuts=blocks.2", 1),
        ("pipeline=2,schedule=zbv,cuts=blocks.1/blocks.2/blocks.3", 1),  # both ends on rank 0
    ],
)
def test_the_fullest_rank_holds_what_the_plan_predicts(strategy: str, accumulate: int) -> None:
    step = planned(accumulate).step_cost(strategy)
    predicted = peak(step).total - step.model.buffer_bytes
    found = max(world.run(2, held_by_this_rank, strategy, accumulate))
    assert predicted == pytest.approx(found, rel=0.035)


def layers(number: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(number)))


def own_memory_of_the_server(number: int) -> int:
    """Return the bytes of its own that the server of a model of so many layers has; without the
    values, which workers read.
    """
    run, model = shoal.init("server=1", announce=lambda _: None), layers(number)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9))
    for _ in range(3):
        optimizer.zero_grad()
        run.forward_backward(lambda x: model(x).square().mean(), torch.ones(2, 1024))
        optimizer.step()
    run.mesh.barrier()
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in descendants(os.getppid())]
    run.mesh.barrier()
    (status,) = [status for status in statuses if status.startswith("Name:\tshoal server 0\n")]
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def predicted_of_the_servers(number: int, hosts: int) -> float:
    model = layers(number)
    work = trace_model(
        model,
        lambda x: model(x).square().mean(),
        lambda module: torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9),
        (torch.ones(2, 1024),),
    )
    each = tuple(Host(str(i), 2 // hosts, 1e9, LINK, LINK) for i in range(hosts))
    planner = Planner(Workload(work, model, 4), UNKNOWN_CPU, Cluster(each, {}))
    return 2 * peak(planner.step_cost("server=1")).servers


@pytest.mark.slow
def test_a_server_holds_what_the_plan_predicts() -> None:
    few, many = (max(world.run(2, own_memory_of_the_server, number)) for number in (4, 20))
    values = 16 * sum(p.nbytes for p in layers(1).parameters())
    predicted = predicted_of_the_servers(20, 1) - predicted_of_the_servers(4, 1) - values
    assert many - few == pytest.approx(predicted, rel=0.25)  # an allocator has some of its own


def test_servers_hold_a_gradient_of_each_worker_on_another_host() -> None:
    size = sum(p.nbytes for p in layers(4).parameters())
    assert predicted_of_the_servers(4, 1) == 3 * size  # values, momentum, and a sum
    assert predicted_of_the_servers(4, 2) == 4 * size
