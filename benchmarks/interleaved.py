"""Candidates that live in the same processes and run in turn, in a new random order each round.

    round 1   ours │ by hand        ratio of these two
    round 2   by hand │ ours        ratio of these two      the result is the median of the ratios

The load of the machine changes from minute to minute. Within a round it is nearly the same for all
candidates."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

WARM_UP = 2


def in_turns(
    epochs: Mapping[str, Callable[[], object]], steps: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step on the slower rank, a number for each round. Collective.

    Args: epochs: take so many `steps` each, on every rank.
    """
    times_s: dict[str, list[float]] = {name: [] for name in epochs}
    chance = random.Random(0)
    gc.collect()
    # what one candidate keeps in memory shall not lengthen the collections in another's turn
    gc.freeze()
    for counted in [False] * WARM_UP + [True] * rounds:
        for name in chance.sample(list(epochs), len(epochs)):
            dist.barrier()
            started_s = time.perf_counter()
            epochs[name]()
            slower = torch.tensor((time.perf_counter() - started_s) / steps, dtype=torch.float64)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            if counted:
                times_s[name].append(slower.item())
    return times_s
