"""Measures all candidates in turns, in the same two processes, and writes result.json. Run it by
`make bench-overhead`.

    round 1   Shoal  Fabric  hand-written  Accelerate  Trainer         one epoch each, a barrier
    round 2   hand-written  Accelerate  Shoal  Fabric  Trainer  ...    before each; a new order

Whatever slows the machine down for longer than a round slows all of them down, so it is the ratios
within a round that are believed. Lightning's Trainer owns its loop: the others run between two of
its epochs, when its clock stands."""

from __future__ import annotations

import argparse
import gc
import logging
import random
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.overhead.tasks import (  # before lightning: it makes torchvision importable
    RANK_BATCH,
    Task,
    cnn,
    mlp,
)
from benchmarks.report_page import circumstances, write_result

from benchmarks.overhead.candidates import LOOPS, HandWritten, Trainer, fit  # isort: skip

RESULT = Path(__file__).with_name("result.json")
WARM_UP = 3  # rounds that do not count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, help="instead of each task's own number")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    _quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts = circumstances(("torch", "shoal", "accelerate", "lightning"))
    result = {
        "circumstances": facts,
        "difference_after_one_epoch": unlike_the_yardstick(mlp()),
        "tasks": {
            task.name: measure(task, options.rounds or task.rounds) for task in (mlp(), cnn())
        },
    }
    if dist.get_rank() == 0:
        write_result(options.out, result)
    dist.destroy_process_group()


def measure(task: Task, rounds: int) -> dict[str, object]:
    """Times of every round, slower rank's, in seconds for a step; and the losses at the end."""
    ranks, chance = dist.get_world_size(), random.Random(0)
    loops = [loop(task, ranks, shuffle=True) for loop in LOOPS]
    times_s: dict[str, list[float]] = {candidate.name: [] for candidate in (*LOOPS, Trainer)}
    losses: dict[str, float] = {}
    started_s = 0.0

    def all_others_then_start() -> None:
        nonlocal started_s
        for loop in chance.sample(loops, len(loops)):
            dist.barrier()
            before_s = time.perf_counter()
            loss = loop.epoch()
            times_s[loop.name].append(time.perf_counter() - before_s)
            losses[loop.name] = loss.item()
        dist.barrier()
        started_s = time.perf_counter()

    def stop() -> None:
        times_s[Trainer.name].append(time.perf_counter() - started_s)

    trainer = Trainer(task, all_others_then_start, stop)
    gc.collect()
    # what one library keeps in memory shall not lengthen the collections in another's turn
    gc.freeze()
    fit(trainer, task, ranks, WARM_UP + rounds, shuffle=True)
    gc.unfreeze()
    losses[Trainer.name] = trainer.loss.item()
    steps = len(task.dataset) // (RANK_BATCH * ranks)
    return {
        "rounds": rounds,
        "steps_in_a_round": steps,
        "step_s": {name: _slower_rank(times, steps)[WARM_UP:] for name, times in times_s.items()},
        "last_loss": losses,
    }


def unlike_the_yardstick(task: Task) -> dict[str, float]:
    """How far each candidate's parameters are from the hand-written loop's after one epoch in the
    data's own order.

    Unshuffled, all libraries put the same samples in a global batch, and the averaged gradients
    must be the same. (With
    BatchNorm they are not: each rank normalises over its own samples, and which ones these are is a
    library's choice.)"""
    ranks = dist.get_world_size()
    models = {}
    for loop in (loop(task, ranks, shuffle=False) for loop in LOOPS):
        loop.epoch()
        models[loop.name] = loop.model
    trainer = Trainer(task, _nothing, _nothing)
    fit(trainer, task, ranks, epochs=1, shuffle=False)
    models[Trainer.name] = trainer.model
    values = {
        name: torch.cat([p.detach().flatten() for p in model.parameters()])
        for name, model in models.items()
    }
    yardstick = values[HandWritten.name]
    moved = (
        yardstick - torch.cat([p.detach().flatten() for p in task.model().parameters()])
    ).norm()
    return {name: ((value - yardstick).norm() / moved).item() for name, value in values.items()}


def _nothing() -> None:
    """Between the epochs of the check."""


def _slower_rank(times_s: list[float], steps: int) -> list[float]:
    slowest = torch.tensor(times_s, dtype=torch.float64) / steps
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
