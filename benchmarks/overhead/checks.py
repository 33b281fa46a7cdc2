"""The cost of the checks of a step, as a share of a step of some 5 ms.

To look at gradients is to read them once more, from the third cache at best. So two models are
measured: a CNN, which computes much with few parameters, and an MLP of 460,000 parameters on 64
rows, of which every gradient is as dear as it gets.

    round 1   all checks  no checks      a step each, in a new order, on all ranks
    round 2   no checks  all checks

Both candidates live in the same processes and take single steps in turn, so that a disturbance that
is longer than a round falls on both. While one steps, the guards of the other take no part: they
would look for the parameters of the other in its backward pass, which no run alone does. The first
figure is the ratio of the fastest tenths, which tells what the code costs on a machine that others
use too; then the median of the rounds' ratios, with the spread of the medians of ten parts of the
rounds. Where the machine has more work than cores, differences of steps are lost in what the others
do: so the checks' own functions are timed too, by the processor's clock, in a run with them all.

    python -m benchmarks.overhead.checks
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from benchmarks.report_page import circumstances, ratios, write_result
from shoal.run.guards.guarded_models import StepPhase
from shoal.run.guards.guards import Guards
from shoal.run.nonfinite_steps import NonfiniteSteps
from shoal.strategies.grad_checks import FiniteCheck
from shoal.testing import world

RESULT = Path(__file__).with_name("checks.json")
ROWS, BATCHES, WARM_UP, PARTS, FIRST_STEPS = 64, 8, 20, 10, 7
WIDTH = 640  # of the MLP: a step of some 3 to 5 ms on one core
CANDIDATES: dict[str, dict[str, Any]] = {
    "all checks": {},
    "no checks": {"guards": False, "nonfinite": "ignore"},
}
FUNCTIONS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (NonfiniteSteps, ("begin", "judge", "before_optimizer_step")),
    (FiniteCheck, ("look",)),
    (Guards, ("before_step", "after_step")),
    (StepPhase, ("__enter__", "__exit__")),
)
"""Functions of the checks that a step calls. Not the look at gradients on several ranks: it happens
while they are copied into the message, so only the difference of steps tells what it adds."""
Step = Callable[[], object]


def measured(model: str, rounds: int) -> dict[str, Any]:
    """Return seconds of each step on the slower rank, by candidate. Collective.

    Beside them those of the processor in the thread that steps, on this rank: a machine that others
    use too changes them less. On several ranks they hold the spinning for each other.
    """
    torch.set_num_threads(1)
    steps = {name: stepping(model, checks) for name, checks in CANDIDATES.items()}
    chance = random.Random(0)
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    cpu_s: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(WARM_UP + rounds):
        for name in chance.sample(list(steps), len(steps)):
            (other,) = (run for each, (_, run) in steps.items() if each != name)
            with other._prepared.guards.phase:
                started_s, began_s = time.perf_counter(), time.thread_time()
                steps[name][0]()
                ended_s, worked_s = time.perf_counter(), time.thread_time() - began_s
            if number >= WARM_UP:
                times_s[name].append(ended_s - started_s)
                cpu_s[name].append(worked_s)
    slower = torch.tensor([times_s[name] for name in steps], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(slower, dist.ReduceOp.MAX)
    return {"step_s": dict(zip(steps, slower.tolist(), strict=True)), "cpu_s": cpu_s}


def spent(model: str, rounds: int) -> list[float]:
    """Return seconds of the processor in the checks of each step, the clock's own included.

    Collective. Of the thread that steps, on this rank. Not in them: what a hook of torch takes to
    be called, and what the checks push out of the caches.
    """
    torch.set_num_threads(1)
    spent_s = [0.0]
    for owner, names in FUNCTIONS:
        for name in names:  # in a process that measures nothing else
            setattr(owner, name, _timed(getattr(owner, name), spent_s))
    step, _ = stepping(model, {})
    found = []
    for _ in range(WARM_UP + rounds):
        spent_s[0] = 0.0
        step()
        found.append(spent_s[0])
    return found[WARM_UP:]


def first_steps(model: str) -> float:
    """Return how many later steps the first step of a run takes. Collective."""
    torch.set_num_threads(1)
    step, _ = stepping(model, {})
    times_s = []
    for _ in range(WARM_UP):
        started_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - started_s)
    return times_s[0] / median(times_s[WARM_UP // 2 :])


def _timed(function: Callable[..., Any], spent_s: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        result = function(*args, **kwargs)
        spent_s[0] += time.thread_time() - began_s
        return result

    return call


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model, and the shape of its samples."""
    first, second = nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(WIDTH, 10)), (64,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model, and the shape of its samples."""
    first, second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
    pooled = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(first, nn.ReLU(), second, *pooled), (3, 32, 32)


MODELS = {"CNN": cnn, "MLP": mlp}


def stepping(name: str, checks: dict[str, Any]) -> tuple[Step, shoal.Run]:
    """Return a step of a model of its own, and its run. Collective."""
    torch.manual_seed(0)
    run = shoal.init(announce=lambda _: None, **checks)
    model, shape = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = ROWS * BATCHES * run.world_size
    data = TensorDataset(torch.randn(rows, *shape), torch.randint(10, (rows,)))
    run.prepare(model, optimizer)
    batches = list(run.prepare(DataLoader(data, ROWS * run.world_size)))
    taken = 0

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def step() -> object:
        nonlocal taken
        x, y = batches[taken % BATCHES]
        taken += 1
        optimizer.zero_grad()
        loss = run.forward_backward(compute_loss, x, y)
        optimizer.step()
        return loss

    return step, run


def share(step_s: dict[str, list[float]]) -> str:
    """Return what all checks take beyond none, in percent of the step: of fastest tenths; the
    median, and its spread.
    """
    on, off = step_s["all checks"], step_s["no checks"]
    percent = [100 * (ratio - 1) for ratio in ratios(on, off)]
    length = len(percent) // PARTS
    medians = sorted(median(percent[part * length :][:length]) for part in range(PARTS))
    best, middle = 100 * (tenth(on) / tenth(off) - 1), median(percent)
    return f"**{best:.2f} %**; {middle:.2f} % ({medians[1]:.2f} to {medians[-2]:.2f})"


def tenth(times_s: list[float]) -> float:
    """Return the time that a tenth of all stay below."""
    return sorted(times_s)[len(times_s) // 10]


def rows_of(found: dict[str, Any]) -> dict[str, str]:
    """Return the cells of the report of one model and number of ranks."""
    cpu_us = {name: 1e6 * tenth(times_s) for name, times_s in found["cpu_s"].items()}
    more_us = cpu_us["all checks"] - cpu_us["no checks"]
    spent_us = [1e6 * time_s for time_s in found["spent_s"]]
    return {
        "a step without checks": f"{1e3 * median(found['step_s']['no checks']):.2f} ms",
        "all checks of a step together": share(found["step_s"]),
        "all checks of a step, processor time": f"{more_us:.0f} us",
        "the same, in their own functions": f"{tenth(spent_us):.0f} us; {median(spent_us):.0f} us",
        "the first step, with the trial of its loss": f"{median(found['first']):.0f} steps",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    result: dict[str, Any] = {"circumstances": circumstances(("torch", "shoal")), "found": {}}
    for ranks, model in product(options.ranks, MODELS):
        found = world.run(ranks, measured, model, options.rounds, timeout_s=600)[0]
        found["spent_s"] = world.run(ranks, spent, model, options.rounds, timeout_s=600)[0]
        found["first"] = [world.run(ranks, first_steps, model)[0] for _ in range(FIRST_STEPS)]
        name = f"{model}, {ranks} rank{'s' * (ranks > 1)}"
        result["found"][name] = found
        print(name, rows_of(found), flush=True)
    write_result(RESULT, result)


if __name__ == "__main__":
    main()
