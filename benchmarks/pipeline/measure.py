"""How long ranks of a pipeline are idle: stages that wait for a fixed time, and real ones. Writes
result.json.

Every rank notes when it works, on the clock that all processes of a machine share. A step begins
with the first piece of work on any rank and ends with the last; what a rank does not work in it, it
is idle."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.pipeline.simulated_stages import DIARY, waiting
from benchmarks.report_page import circumstances, write_result
from shoal.models import build
from shoal.run import init_with_place
from shoal.run.supervised import supervised
from shoal.strategies.pipeline.p2p import StageComm
from shoal.strategies.pipeline.schedule_timing import (
    bubble_fractions,
    expected_bubble,
    in_flight,
    length,
    timeline,
)
from shoal.strategies.pipeline.schedules import SCHEDULES, ScheduleTable, problems, table
from shoal.testing import world

RESULT = Path(__file__).with_name("result.json")
OVERHEAD_S, AIM, LEAST_UNIT_S = 0.001, 0.03, 0.02
"""Time that a machine adds to a unit of work, about; the largest share of the idle time that it may
be; the shortest unit.
"""
LONGEST_S, MOST_STEPS = 320.0, 3
"""For so long the steps of a case may go on, but there is one at least; and this many at most."""
WARM_UP_UNIT_S, READY_AFTER_S = 0.002, 40.0


def main() -> None:
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "shoal")),
        "waiting": [],
        "real": [],
    }
    for ranks in (2, 4):
        result["waiting"] += waiting_cases([case for case in cases() if case[1] == ranks])
        write_result(RESULT, result)
    for name in SCHEDULES:
        if name != "naive":
            result["real"].append(real_case(name, 2, 8))
            write_result(RESULT, result)


def cases() -> list[tuple[str, int, int]]:
    """Schedule, ranks, micro-batches."""
    found = [(name, ranks, m) for ranks in (2, 4) for name in SCHEDULES for m in (1, 4, 8, 16)]
    return [
        case for case in found if (case[0] == "naive") == (case[2] == 1) and not problems(*case)
    ]


def unit_s(made: ScheduleTable) -> float:
    """So long that what the machine adds is a small share of the idle time."""
    return max(LEAST_UNIT_S, OVERHEAD_S / (AIM * max(bubble_fractions(timeline(made)))))


def waiting_cases(wanted: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Schedules with stages that wait, all at the same time, for nobody computes; they begin
    once all are ready.
    """
    begin_at_s = time.monotonic() + READY_AFTER_S
    with ExitStack() as stack:
        worlds = []
        for name, ranks, microbatches in wanted:
            arguments = (name, ranks, microbatches, begin_at_s)
            worlds.append(
                stack.enter_context(world.start(ranks, wait_through, *arguments, timeout_s=900))
            )
        found = [started.results() for started in worlds]
    return [told(*case, by_rank) for case, by_rank in zip(wanted, found, strict=True)]


def told(
    name: str,
    ranks: int,
    microbatches: int,
    by_rank: list[tuple[list[list[tuple[float, float]]], int]],
) -> dict[str, Any]:
    """The results of one case: idle shares rank by rank, the median of steps."""
    made = table(name, ranks, microbatches)
    totals_s, shares = [], []
    for spans in zip(*(steps for steps, _ in by_rank), strict=True):
        total_s = max(end for rank in spans for _, end in rank) - min(
            start for rank in spans for start, _ in rank
        )
        totals_s.append(total_s)
        shares.append([1 - sum(end - start for start, end in rank) / total_s for rank in spans])
    found = {
        "schedule": name,
        "ranks": ranks,
        "microbatches": microbatches,
        "unit_s": unit_s(made),
        "steps": len(totals_s),
        "step_s": median(totals_s),
        "actions": max(len(row) for row in made.rows),
        "idle": [median(column) for column in zip(*shares, strict=True)],
        "formula": expected_bubble(name, ranks, microbatches, made.num_stages // ranks)[1],
        "table": bubble_fractions(timeline(made)),
        "held": [peak for _, peak in by_rank],
        "in_flight": in_flight(made),
    }
    print(found, flush=True)
    return found


def wait_through(
    name: str, ranks: int, microbatches: int, begin_at_s: float
) -> tuple[list[list[tuple[float, float]]], int]:
    """Take the steps of one rank.

    Returns: the spans of its work in each step, and the most activations that it held.
    """
    made = table(name, ranks, microbatches)
    cuts = "/".join(str(stage) for stage in range(1, made.num_stages))
    run = init_with_place(
        f"pipeline={ranks},schedule={name},microbatches={microbatches},cuts={cuts}",
        announce=lambda _: None,
    )
    model = waiting(made.num_stages)
    data = TensorDataset(torch.zeros(microbatches, 1), torch.zeros(microbatches, 1))
    loader = DataLoader(data, batch_size=microbatches)
    model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    def step(unit: float) -> list[tuple[float, float]]:
        DIARY.spans, DIARY.peak, DIARY.unit_s = [], 0, unit
        for x, y in loader:
            run.mesh.barrier()
            run.forward_backward(supervised(F.mse_loss, model), x, y)
        return DIARY.spans

    step(WARM_UP_UNIT_S)  # sends headers, and is not counted
    gc.collect()
    gc.freeze()
    late_s = time.monotonic() - begin_at_s
    assert late_s < 0, f"the cases began {late_s:.0f} s before all were ready"
    time.sleep(-late_s)
    length_s = length(timeline(made)) * unit_s(made)
    steps = max(1, min(MOST_STEPS, int(LONGEST_S / length_s)))
    return [step(unit_s(made)) for _ in range(steps)], DIARY.peak


def real_case(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """One schedule with a GPT of eight blocks: the share of a step that ranks wait for messages."""
    found = world.run(ranks, compute_through, name, ranks, microbatches, timeout_s=600)
    made = table(name, ranks, microbatches)
    return {
        "schedule": name,
        "ranks": ranks,
        "microbatches": microbatches,
        "idle": [rank[0] for rank in found],
        "step_s": max(rank[1] for rank in found),
        "shares": found[0][2],
        "formula": expected_bubble(name, ranks, microbatches, made.num_stages // ranks)[1],
    }


def compute_through(name: str, ranks: int, microbatches: int) -> tuple[float, float, str]:
    """Take the steps of one rank with a real model. Return idle share and time of the median step,
    and the startup summary.
    """
    torch.set_num_threads(1)
    said: list[str] = []
    run = init_with_place(
        f"pipeline={ranks},schedule={name},microbatches={microbatches}", announce=said.append
    )
    model = build("gpt", 512, (64,), {"width": 192, "layers": 8, "heads": 4})
    tokens = torch.randint(
        0, 512, (2 * microbatches, 65), generator=torch.Generator().manual_seed(0)
    )
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2 * microbatches)
    model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    waited_s = _watch_waiting()
    steps = []
    for _ in range(MOST_STEPS + 1):
        for x, y in loader:
            run.mesh.barrier()
            waited_s.clear()
            start = time.monotonic()
            run.forward_backward(supervised(_loss, model), x, y)
            total = time.monotonic() - start
            # At the end ranks wait for each other; what they wait for totals is idle time too.
            steps.append((sum(waited_s) / total, total))
    idle, total = sorted(steps[1:], key=lambda step: step[1])[MOST_STEPS // 2]
    return idle, total, next((line for line in said if line.startswith("pipeline of")), "")


def _watch_waiting() -> list[float]:
    """The times for which this process waits in a pipeline, from now on."""
    import torch.distributed as dist

    waited_s: list[float] = []

    def timed(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            start = time.monotonic()
            try:
                return function(*args, **options)
            finally:
                waited_s.append(time.monotonic() - start)

        return call

    StageComm.recv_forward = timed(StageComm.recv_forward)  # type: ignore[method-assign]
    StageComm.recv_backward = timed(StageComm.recv_backward)  # type: ignore[method-assign]
    dist.all_reduce = timed(dist.all_reduce)
    return waited_s


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main()
