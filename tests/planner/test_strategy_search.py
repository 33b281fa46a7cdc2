"""The search over strategy lines: what is compared, what is refused, and what is best."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.costs.cluster import Cluster, Host, Link, one_host
from shoal.costs.machine import UNKNOWN_CPU
from shoal.errors import ConfigError, StrategyRefused
from shoal.planner.calibration import MOST_RANKS, engines, planned_step
from shoal.planner.operation_speeds import MakeStep
from shoal.planner.plan_report import as_json, explain, report
from shoal.planner.smallest_change import Command
from shoal.planner.strategy_search import COMPARED, Planner, Workload, candidate_lines
from shoal.planner.trace_model import trace_model
from shoal.strategies import parse_line


class Blocks(nn.Module):
    """Blocks in a list, as most models hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


@pytest.fixture(scope="module")
def workload() -> Workload:
    model = Blocks()
    work = trace_model(
        model,
        lambda x: model(x).square().mean(),
        lambda module: torch.optim.SGD(module.parameters(), 0.1),
        (torch.zeros(1, 64),),
        "blocks",
    )
    return Workload(work, model, 32)


SPEEDS = replace(UNKNOWN_CPU.compute[1], overheads={"fsdp message": 1e-3, "tensor sum": 1e-3})


def planner(workload: Workload, ranks: int, memory: float = 2.0**40) -> Planner:
    machine = replace(UNKNOWN_CPU, compute={1: SPEEDS})
    return Planner(workload, machine, one_host(ranks, ranks * memory))


def test_servers_on_hosts_of_their_own_take_no_memory_of_ranks_and_share_links(
    workload: Workload,
) -> None:
    beside = planner(workload, 2).plan("server=2")
    link = Link(1e6)
    ranks = one_host(2, 2.0**40).hosts[0]._replace(link=link)
    machine = planner(workload, 2).machine

    def plan_on(hosts: int) -> Any:
        alone = tuple(Host(f"s{index}", 0, 0.0, link, link) for index in range(hosts))
        return Planner(workload, machine, Cluster((ranks,), {}, server_hosts=alone)).plan(
            "server=2"
        )

    assert beside.memory.servers > 0
    assert plan_on(1).memory.servers == 0
    of_one, of_two = plan_on(1).time, plan_on(2).time
    assert beside.time is not None
    assert of_one.seconds > beside.time.seconds, "a link of 1 MB/s is slower than this machine"
    assert of_one.seconds == pytest.approx(of_two.seconds), "the workers share a link just as slow"


@pytest.mark.parametrize("ranks", [1, 2, 6, 8])
def test_every_candidate_is_a_strategy_line_that_the_ranks_can_have(ranks: int) -> None:
    lines = [*candidate_lines(ranks)]
    assert len(lines) == len({*lines})
    for line in lines:
        parse_line(line)
    assert ("ddp" in lines) == (ranks > 1)
    assert ("single" in lines) == (ranks == 1)
    assert not any("tensor=2," in line and "zero" in line for line in lines) or ranks > 2
    assert not any("pipeline=4" in line for line in lines) or ranks == 8


def test_plans_are_sorted_by_time_and_best_is_exact(workload: Workload) -> None:
    plans = planner(workload, 2).search()
    times = [plan.latest_s for plan in plans.fitting]
    assert times == sorted(times)
    assert plans.best is not None
    assert plans.best.step.is_exact
    assert plans.best.latest_s <= 1.05 * min(p.latest_s for p in plans.fitting if p.step.is_exact)


def test_guessed_speeds_choose_the_simpler_of_two_plans_that_are_nearly_as_fast(
    workload: Workload,
) -> None:
    found = planner(workload, 2).search()
    assert found.alike == 0.25
    fast, simple = (next(p for p in found.fitting if p.strategy == s) for s in ("zero1", "ddp"))
    assert fast.time is not None
    times = (replace(fast.time, seconds=seconds) for seconds in (0.010, 0.011))
    fitting = tuple(
        replace(plan, time=time) for plan, time in zip((fast, simple), times, strict=True)
    )
    assert [replace(found, fitting=fitting, alike=a).best for a in (0.25, 0.05)] == [*fitting[::-1]]


def test_the_best_has_room_for_what_its_memory_may_be_wrong_by_where_any_has(
    workload: Workload,
) -> None:
    roomy = planner(workload, 2).search().best
    assert roomy is not None
    limit = roomy.memory.total * 1.01
    narrow = planner(workload, 2, memory=limit)
    plans = narrow.search()
    assert plans.best is not None
    assert plans.best.memory.total * 1.03 <= limit
    assert plans.best.strategy != roomy.strategy
    said = report(narrow, plans, Command())
    assert f"{plans.best.strategy} is the fastest with room for what a prediction" in said

    only = narrow.search([roomy.strategy])
    assert only.best is not None
    assert only.best.is_tight
    assert "\ntight: " in report(narrow, only, Command())


def test_what_engines_do_around_operations_is_calibrated_by_its_name(workload: Workload) -> None:
    used: set[str] = set()
    for line in candidate_lines(4):
        with contextlib.suppress(StrategyRefused, ConfigError):
            step = planner(workload, 4).step_cost(line)
            messages = (m for s in step.segments for m in (*s.before_forward, *s.after_backward))
            used |= {name for m in messages for name, _ in m.around}
            used |= {name for name, _ in step.around_pass}
    assert used == {name for _, names, _ in engines(4) for name in names}


@pytest.mark.parametrize(
    ("line", "case"), [(line, case) for line, _, cases in engines(MOST_RANKS) for case in cases]
)
def test_the_blocks_that_calibrate_engines_can_be_divided_by_the_most_ranks(
    line: str, case: MakeStep
) -> None:
    seconds = planned_step(UNKNOWN_CPU, MOST_RANKS, line, case)
    assert seconds(UNKNOWN_CPU.compute[1]) > 0


def test_a_pass_of_a_pipeline_takes_what_its_engine_does_around_it(workload: Workload) -> None:
    def seconds(**overheads: float) -> float:
        speeds = {1: replace(UNKNOWN_CPU.compute[1], overheads=overheads)}
        machine = replace(UNKNOWN_CPU, compute=speeds, cores=0)
        plan = Planner(workload, machine, one_host(2, 2.0**40)).plan("pipeline=2,microbatches=4")
        return plan.seconds

    # The last stage waits for one pass, makes 4 forward and 4 backward ones, and the first has one.
    assert seconds(**{"pipeline pass": 1.0}) - seconds() == pytest.approx(10.0, abs=0.01)


def test_stages_send_at_once_each_over_its_own_link(workload: Workload) -> None:
    send_s, stages, microbatches = 1.0, 4, 16
    size = 32 / microbatches * 64 * 4  # samples x numbers x bytes
    link = Link(size / send_s, latency_s=0.0)
    hosts = tuple(Host(f"h{n}", 1, 2.0**40, link, link) for n in range(stages))
    planner = Planner(workload, UNKNOWN_CPU, Cluster(hosts, {}))
    plan = planner.plan(f"pipeline={stages},microbatches={microbatches},schedule=gpipe")
    # There and back: the first stage sends all, and the last message passes the other links.
    assert plan.seconds == pytest.approx(2 * send_s * (microbatches + stages - 2), rel=0.05)


def test_a_search_gives_the_same_plans_twice(workload: Workload) -> None:
    first, second = (planner(workload, 4).search() for _ in range(2))
    assert [(p.strategy, p.seconds) for p in first.fitting] == [
        (p.strategy, p.seconds) for p in second.fitting
    ]


def test_what_does_not_fit_is_told_by_how_much(workload: Workload) -> None:
    memory = 90_000.0
    tight = planner(workload, 2, memory)
    plans = tight.search(["ddp", "zero3"])
    (ddp,) = (plan for plan in plans.too_large if plan.strategy == "ddp")
    assert ddp.missing_bytes == ddp.memory.total - memory > 0
    assert ddp.time is None
    assert "does not fit by" in report(tight, plans, Command())


def test_refusals_are_told_in_the_strategys_own_words(workload: Workload) -> None:
    plans = planner(workload, 2).search(["single"])
    assert plans.refused["single"].endswith("Use ddp, or start one process.")


def test_more_ranks_than_samples_are_refused(workload: Workload) -> None:
    plans = planner(workload, 64).search(["ddp"])
    assert "batch 32 cannot be cut for 64 ranks" in plans.refused["ddp"]
    assert plans.best is None


def test_lines_of_a_report_fit_a_screen(workload: Workload) -> None:
    made = planner(workload, 4)
    text = report(made, made.search(), Command())
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[-1].startswith("shoal launch -n 4 --strategy ")
    detail = explain(made, made.plan("pipeline=2,zero1"), Command())
    assert max(map(len, detail.splitlines())) <= 100
    assert "fits" in detail


def test_json_has_every_plan_and_every_refusal(workload: Workload) -> None:
    made = planner(workload, 2)
    plans = made.search()
    read = as_json(made, plans)
    assert len(read["plans"]) == len(plans.fitting) + len(plans.too_large)
    assert read["refused"] == plans.refused
    kinds = read["plans"][0]["memory"]
    assert kinds["total"] == pytest.approx(sum(v for k, v in kinds.items() if k != "total"))


@pytest.mark.parametrize("ranks", [4, 8])
def test_what_is_not_simulated_cannot_be_among_the_best(workload: Workload, ranks: int) -> None:
    """A search that stops early chooses as one that simulates all, and shows the same plans: no
    step takes less than its least time.
    """
    made = planner(workload, ranks)
    short, whole = made.search(), made.search([*candidate_lines(ranks)])
    assert short.slower
    assert not whole.slower
    assert len(short.fitting) + len(short.slower) == len(whole.fitting)
    assert short.best is not None
    assert whole.best is not None
    assert short.best.strategy == whole.best.strategy
    shown = [plan.strategy for plan in whole.fitting[:COMPARED]]
    assert [plan.strategy for plan in short.fitting[:COMPARED]] == shown
    assert "more that are slower" in report(made, short, Command())
    for plan in whole.fitting:
        assert 0 < plan.least_s <= plan.seconds * (1 + 1e-9), plan.strategy
