"""The cost of a trace: steps with none asked for, with one asked for but not being taken, and while
it is being taken.

    round 1   asked for  none  recording         so many steps each, a barrier before and after;
    round 2   recording  asked for  none         the order is drawn anew in every round

Run it by `make bench-trace`.
"""

from __future__ import annotations

import argparse
import atexit
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import shoal
from benchmarks.collectives.steps import networks
from benchmarks.report_page import circumstances, write_result
from shoal.run.supervised import supervised

RESULT = Path(__file__).with_name("result.json")
ROWS, WARM_UP, LATER = 32, 10, "1@1000000000"
WAYS = {"none": None, "asked for": LATER, "recording": LATER}
"""Values of `shoal.init(trace=...)`."""


class Loop:
    """A training loop as docs/library.md has it."""

    def __init__(self, build: Callable[[], torch.nn.Module], trace: str | None) -> None:
        torch.manual_seed(0)
        self.run = shoal.init(announce=lambda _: None, trace=trace)
        model = build()
        data = torch.utils.data.TensorDataset(
            torch.randn(ROWS, 1, 8, 8), torch.randint(0, 10, (ROWS,))
        )
        loader = torch.utils.data.DataLoader(data, ROWS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer, loader = self.run.prepare(model, optimizer, loader)
        self.batch = next(iter(loader))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.run.forward_backward(supervised(F.cross_entropy, self.model), *self.batch)
            self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:shoal")
    facts = circumstances(("torch", "shoal"))
    step_s = {
        name: _measure(build, steps, options.rounds) for name, (build, steps) in networks().items()
    }
    if dist.get_rank() == 0:
        write_result(options.out, {"circumstances": facts, "step_s": step_s})
    dist.destroy_process_group()


def _measure(
    build: Callable[[], torch.nn.Module], steps: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds for a step of the slower rank, of every round. Collective."""
    loops = {way: Loop(build, trace) for way, trace in WAYS.items()}
    for loop in loops.values():
        loop.steps(WARM_UP)
    chance, found = random.Random(0), {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in chance.sample(list(WAYS), len(WAYS)):
            found[way].append(_turn(loops[way], steps, recording=way == "recording"))
    for loop in loops.values():
        _forget(loop)
    slowest = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(found, slowest.tolist(), strict=True))


def _forget(loop: Loop) -> None:
    """That a trace was asked for, of which nobody shall be told that it was not written."""
    tracing: Any = loop.run._prepared.tracing
    if tracing is not None:
        atexit.unregister(tracing._warn_not_traced)


def _turn(loop: Loop, steps: int, recording: bool) -> float:
    tracing: Any = loop.run._prepared.tracing
    if recording:
        tracing.watch()
    dist.barrier()
    begin_s = time.perf_counter()
    loop.steps(steps)
    dist.barrier()
    took_s = (time.perf_counter() - begin_s) / steps
    if recording:
        assert len(tracing.unwatch()) > steps
    return took_s


if __name__ == "__main__":
    main()
