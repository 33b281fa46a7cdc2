"""How long ranks of a pipeline are idle: stages that wait for a fixed time, and real ones. Writes result.json.

Every rank notes when it works, on the clock that all processes of a machine share. A step begins with the first piece
of work on any rank and ends with the last; what a rank does not work in it, it is idle.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.page import circumstances
from benchmarks.pipeline.waiting import DIARY, UNIT_S, waiting
from shoal.models import build
from shoal.pipeline.schedules import SCHEDULES, problems, table
from shoal.pipeline.timing import formula, idle_shares, in_flight, timeline
from shoal.pipeline.wire import Exchange
from shoal.run import begin
from shoal.testing import world

HERE = Path(__file__).parent
STEPS = 3


def main() -> None:
    result: dict[str, Any] = {"circumstances": circumstances(("torch", "shoal")), "unit_s": UNIT_S, "steps": STEPS}
    result |= {"waiting": [], "real": []}
    for ranks in (2, 4):
        for name in SCHEDULES:
            for microbatches in (1,) if name == "naive" else (4, 8, 16):
                if not problems(name, ranks, microbatches):
                    keep(result, "waiting", case(name, ranks, microbatches))
    for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"):
        keep(result, "real", real_case(name, 2, 8))


def keep(result: dict[str, Any], kind: str, found: dict[str, Any]) -> None:
    """Add what was found to the file, so that nothing is lost where a measurement is broken off."""
    print(found, flush=True)
    result[kind].append(found)
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def case(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """One schedule with stages that wait: idle shares, the median of steps, rank by rank."""
    made = table(name, ranks, microbatches)
    found = world.run(ranks, wait_through, name, ranks, microbatches, made.num_stages, timeout_s=600)
    shares = []
    for step in range(STEPS):
        spans = [rank[0][step] for rank in found]
        total = max(span[1] for rank in spans for span in rank) - min(span[0] for rank in spans for span in rank)
        shares.append([1 - sum(end - start for start, end in rank) / total for rank in spans])
    return {
        "schedule": name,
        "ranks": ranks,
        "microbatches": microbatches,
        "idle": [sorted(column)[STEPS // 2] for column in zip(*shares, strict=True)],
        "formula": formula(name, ranks, microbatches, made.num_stages // ranks)[1],
        "table": max(idle_shares(timeline(made))),
        "held": [rank[1] for rank in found],
        "in_flight": in_flight(made),
    }


def wait_through(name: str, ranks: int, microbatches: int, stages: int) -> tuple[list[list[tuple[float, float]]], int]:
    """What one rank does: the spans of its work in each step, and the most activations it held."""
    cuts = "/".join(str(stage) for stage in range(1, stages))
    run = begin(f"pipeline={ranks},schedule={name},microbatches={microbatches},cuts={cuts}", announce=lambda _: None)
    model = waiting(stages)
    data = TensorDataset(torch.zeros(microbatches, 1), torch.zeros(microbatches, 1))
    loader = DataLoader(data, batch_size=microbatches)
    model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    steps = []
    for step in range(STEPS + 1):
        DIARY.spans, DIARY.peak = [], 0
        for x, y in loader:
            run.mesh.barrier()
            run.forward_backward(F.mse_loss, model, x, y)
        if step:  # the first one sends headers
            steps.append(DIARY.spans)
    return steps, DIARY.peak


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
        "formula": formula(name, ranks, microbatches, made.num_stages // ranks)[1],
    }


def compute_through(name: str, ranks: int, microbatches: int) -> tuple[float, float, str]:
    """What one rank does with a real model: idle share and time of the median step, and what the header said."""
    torch.set_num_threads(1)
    said: list[str] = []
    run = begin(f"pipeline={ranks},schedule={name},microbatches={microbatches}", announce=said.append)
    model = build("gpt", 512, (64,), {"width": 192, "layers": 8, "heads": 4})
    tokens = torch.randint(0, 512, (2 * microbatches, 65), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2 * microbatches)
    model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    waited_s = _watch_waiting()
    steps = []
    for _ in range(STEPS + 1):
        for x, y in loader:
            run.mesh.barrier()
            waited_s.clear()
            start = time.monotonic()
            run.forward_backward(_loss, model, x, y)
            total = time.monotonic() - start
            # At the end ranks wait for each other; what they wait for totals is idle time too.
            steps.append((sum(waited_s) / total, total))
    idle, total = sorted(steps[1:], key=lambda step: step[1])[STEPS // 2]
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

    Exchange.take = timed(Exchange.take)  # type: ignore[method-assign]
    dist.all_reduce = timed(dist.all_reduce)
    return waited_s


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main()
