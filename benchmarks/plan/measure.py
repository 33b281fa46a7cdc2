"""Measures every case: the time of a step, and the most that tensors hold at once. Run it by `make
bench-plan`, when predictions.json is committed.

Rounds go through all cases, so that a slow minute of the machine meets all of them alike;
result.json has a low step of each round: see `low_and_spread`. Beside the time of the clock stand
the processor time of the ranks, which other programs do not lengthen, and its ratio to that of a
step of `REFERENCE` just before it: a neighbour on the host slows both.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader

import shoal
from benchmarks.memory.accounting import Peak, held_bytes
from benchmarks.plan.cases import (
    CASES,
    MODELS,
    PlannedCase,
    loss,
    make_optimizer,
    model_of,
    samples_of,
)
from benchmarks.report_page import circumstances, write_result
from shoal.costs.machine import low_and_spread
from shoal.errors import LaunchError, StrategyRefused
from shoal.planner.operation_speeds import REFERENCE, torch_phases
from shoal.run.supervised import supervised
from shoal.testing import world

RESULT = Path(__file__).with_name("result.json")
WARM, LEAST, SECONDS = 4, 8, 1.0
"""Steps before timing; the fewest timed steps; seconds of timing in a round."""


class OwnPeak(Peak):
    """Counts tensors of the step, and not the shared memory of the backend, which has one size."""

    def _notice(self, tensor: Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor) or tensor.untyped_storage().resizable():
            super()._notice(tensor)


def measured(case: PlannedCase) -> dict[str, Any] | str:
    """Time steps of this rank, and count one. Collective. Return why it is refused, if it is."""
    torch.set_num_threads(1)
    run = shoal.init(case.strategy, accumulate=case.accumulate, announce=lambda _: None)
    model = model_of(case)
    optimizer = make_optimizer(model)
    batch_size = MODELS[case.model].batch
    loader = DataLoader(samples_of(case, 2 * batch_size), batch_size=batch_size)
    try:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        batches = list(loader)
        compute = supervised(loss, model)

        reference = torch_phases(REFERENCE)

        def step() -> tuple[float, float]:
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            run.forward_backward(compute, *batches[0])
            optimizer.step()
            return time.perf_counter() - start_s, time.process_time() - start_cpu_s

        def step_and_ratios() -> tuple[float, float, float, float]:
            reference_s = sum(reference())
            wall_s, cpu_s = step()
            return wall_s, cpu_s, wall_s / reference_s, cpu_s / reference_s

        for _ in range(WARM):
            step()
        samples = [step_and_ratios() for _ in range(LEAST)]
        # Ranks must take as many steps, so rank 0 says how many.
        count = torch.tensor([min(60, int(SECONDS / sorted(samples)[LEAST // 2][0]))])
        dist.broadcast(count, 0)
        samples += [step_and_ratios() for _ in range(max(0, int(count) - LEAST))]
    except StrategyRefused as refused:
        return str(refused)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if case.strategy.startswith("pipeline"):  # the others are of other stages
        parameters = [p for p in parameters if dict.get(optimizer.state, p)]
    state = [
        value
        for p in parameters
        for value in dict.get(optimizer.state, p, {}).values()  # type: ignore[call-overload]
        if isinstance(value, Tensor)
    ]
    step_s, cpu_s, wall_ratio, ratio = zip(*samples, strict=True)
    times = {"step_s": step_s, "cpu_s": cpu_s}
    times |= {"wall_ratio": median(wall_ratio), "ratio": median(ratio)}
    if case.strategy.startswith("server"):  # its values and gradients lie in shared memory
        return {
            **times,
            **dict.fromkeys(("peak_bytes", "parameters", "optimizer"), 0),
        }
    with OwnPeak(parameters, [*state, *batches[0]], run.device) as peak:
        step()
    return {
        **times,
        "peak_bytes": peak.peak_bytes,
        "parameters": held_bytes(parameters),
        "optimizer": held_bytes(state),
    }


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    result: dict[str, Any] = {"circumstances": circumstances(("torch", "shoal")), "cases": []}
    entries = [{**case._asdict(), "rounds": []} for case in CASES]
    if only and RESULT.exists():  # further rounds of some cases
        result = json.loads(RESULT.read_text())
        entries = result["cases"]
    for number in range(rounds):
        for case, entry in zip(CASES, entries, strict=True):
            if only not in case.strategy:
                continue
            entry["rounds"].append(_round(case))
            print(number, case.label, entry["rounds"][-1].get("low_s"), flush=True)
            result["cases"] = entries
            write_result(RESULT, result)


def _round(case: PlannedCase) -> dict[str, Any]:
    try:
        found = world.run(case.ranks, measured, case, timeout_s=240)
    except LaunchError as error:
        return {"failed": str(error)[:500]}
    refused = [each for each in found if isinstance(each, str)]
    if refused:
        return {"refused": refused[0]}
    ranks = [each for each in found if not isinstance(each, str)]
    # A step ends when its slowest rank ends.
    steps = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    cpu = [*zip(*(rank["cpu_s"] for rank in ranks), strict=True)]
    fullest = max(ranks, key=lambda rank: rank["peak_bytes"])
    return {
        "low_s": low_and_spread(steps)[0],
        "median_s": sorted(steps)[len(steps) // 2],
        "steps": len(steps),
        "cpu_slowest_s": low_and_spread([*map(max, cpu)])[0],
        "cpu_sum_s": low_and_spread([*map(sum, cpu)])[0],
        "ratio_slowest": max(rank["ratio"] for rank in ranks),
        "ratio_wall": max(rank["wall_ratio"] for rank in ranks),
        "ratio_sum": sum(rank["ratio"] for rank in ranks),
        **{name: fullest[name] for name in ("peak_bytes", "parameters", "optimizer")},
    }


if __name__ == "__main__":
    main()
