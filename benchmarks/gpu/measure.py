"""Measures steps on one GPU, all candidates in turns, and writes result.json. Run it by
`make bench-gpu`; `--smoke` takes tiny models, on the CPU too, and shows that the program runs.

Candidates that do not fit in memory together are made, measured and freed one after the other, in a
new order each round."""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.loops import Epoch, candidates
from benchmarks.gpu.tasks import Task, peak_flops, tasks, wait_for
from benchmarks.interleaved import in_turns
from benchmarks.report_page import circumstances, write_result

RESULT = Path(__file__).with_name("result.json")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any device")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        sys.exit("there is no CUDA device here; --smoke runs in small on the CPU")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    peak, source = peak_flops(device)
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "torchvision", "timm", "shoal")),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "peak": source,
        "tasks": {},
    }
    for task in tasks(options.smoke):
        found = measured(task, device, options.rounds, not (options.smoke or options.no_compile))
        found["flops"] = task.flops()
        found["peak_flops"] = peak
        result["tasks"][task.name] = found
        print(task.name, {k: round(min(v) * 1e3, 2) for k, v in found["step_s"].items()})
        if not options.smoke:
            write_result(RESULT, result)  # the next may not fit
    dist.destroy_process_group()


def measured(task: Task, device: torch.device, rounds: int, compiles: bool) -> dict[str, Any]:
    """Return times of a step by candidate, bytes of memory, and waits for the device in a step."""
    made = candidates(task)
    epochs: dict[str, Epoch] = {}
    memory: dict[str, int | None] = {}
    waits: dict[str, float | None] = {}
    times_s: dict[str, list[float]] = {name: [] for name in made}
    if not task.alone:
        for name, make in made.items():
            epochs[name], memory[name] = _made(
                lambda make=make: make(task, device, compiles), device
            )
            waits[name] = _waits(epochs[name], device, task.steps)
        times_s = in_turns(epochs, task.steps, rounds)
    else:
        chance = random.Random(0)
        for _ in range(max(rounds // 5, 2)):
            for name in chance.sample(list(made), len(made)):
                make = partial(made[name], task, device, compiles)
                epoch, memory[name] = _made(make, device)
                waits[name] = _waits(epoch, device, task.steps)
                times_s[name] += in_turns({name: epoch}, task.steps, 2)[name]
                del epoch
                gc.unfreeze()
                gc.collect()
                torch.cuda.empty_cache()
    return {"step_s": times_s, "memory_bytes": memory, "waits_per_step": waits}


def _made(make: Callable[[], Epoch], device: torch.device) -> tuple[Epoch, int | None]:
    """Make a candidate, and run an epoch of it. Return it and the most memory that it held."""
    if device.type != "cuda":
        epoch = make()
        epoch()
        return epoch, None
    wait_for(device)
    before = torch.cuda.memory_allocated(device)
    epoch = make()
    epoch()
    torch.cuda.reset_peak_memory_stats(device)  # without what compiling needed
    epoch()
    return epoch, torch.cuda.max_memory_allocated(device) - before


def _waits(epoch: Epoch, device: torch.device, steps: int) -> float | None:
    """Return how often a step waits for the device, by torch's profiler."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        epoch()
    names = [event.name for event in profile.events()]
    return sum(map(names.count, WAITS)) / steps


if __name__ == "__main__":
    main()
