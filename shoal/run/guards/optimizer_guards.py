"""Guards of optimizers' steps.

numbers of groups    such as learning rates must be the same on all ranks
loaded values        must be the same on all ranks: load_state_dict by one rank loads its part alone
batches              must have been shares of the same global batches
weights              must be the same on the ranks that hold the same part of the model

A scheduler that sees each rank's own loss would make the numbers come apart, and the ranks' weights
with them; so would weights that the script draws anew, for each data rank draws other numbers.
Ranks compare these at steps 1, 2, 4, ... 64 of an optimizer, and then at every 64th. Not with the
totals of every step: those are summed, so that a difference needs numbers of their own, and on a
GPU a look at them waits for the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.run.batch_history import BatchHistory, BatchPlaces, difference
from shoal.run.collective_calls import CURE
from shoal.run.guards.equal_weights import check_equal_weights
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.optimizer_binding import group_settings

LONGEST_INTERVAL = 64
"""Steps between two comparisons, at most."""


def guard_group_numbers(
    guarded: GuardedModels,
    with_weights: bool,
    batches: BatchHistory,
    at: Callable[[str], AbstractContextManager[None]],
) -> Iterator[Removable]:
    """Compare the numbers of each optimizer's groups before its steps; yield handles.

    Args:
        with_weights: compare the weights too.
        batches: that steps were computed on.
        at: a context for a collective call of that name.
    """
    # Ranks that step by themselves may be at different steps.
    if guarded.mesh.size > 1 and guarded.local_model.strategy_state.is_synchronous:
        for optimizer in guarded.optimizers:
            compare = _GroupComparison(guarded, with_weights, batches, at)
            yield optimizer.register_step_pre_hook(compare)


class _GroupComparison:
    """Counts the steps of one optimizer, and compares its numbers and the weights over ranks.
    Collective.
    """

    def __init__(
        self,
        guarded: GuardedModels,
        with_weights: bool,
        batches: BatchHistory,
        at: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._at = at
        self._batches = batches
        self._guarded = guarded
        self._with_weights = with_weights
        self._mesh = guarded.mesh
        self._steps = count(1)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        step = next(self._steps)
        if step % LONGEST_INTERVAL and (step & (step - 1) or step > LONGEST_INTERVAL):
            return
        with self._at("optimizer.step()"):
            self._compare(optimizer)

    def _compare(self, optimizer: Optimizer) -> None:
        phase = self._guarded.phase
        own = json.dumps([group_settings(optimizer), self._batches.places, phase.loaded])
        texts = self._mesh.all_gather_str(own)
        groups, places, loaded_by_first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            if text == texts[0]:
                continue
            other_groups, other_places, loaded_by_other = json.loads(text)
            if other_groups != groups:
                raise UsageError(_describe(groups, rank, other_groups))
            if loaded_by_other != loaded_by_first:
                raise UsageError(_describe_loaded(loaded_by_first, rank, loaded_by_other))
            if fact := difference(BatchPlaces(*places), rank, BatchPlaces(*other_places)):
                raise UsageError(f"{fact}{call_site()}. {CURE}")
        phase.loaded = 0
        if self._with_weights:
            check_equal_weights(self._guarded)


def _describe_loaded(first: int, rank: int, other: int) -> str:
    """Return what rank 0 and another rank have loaded differently."""
    loader, idle = (0, rank) if first else (rank, 0)
    fact = f"rank {loader} has loaded weights and rank {idle} has not"
    if first and other:
        fact = f"rank 0 and rank {rank} have loaded different weights"
    return (
        f"load_state_dict: {fact} since the step before, noticed{call_site() or ' now'}. Each rank "
        "keeps its own part of what it loads: call load_state_dict on all ranks, with the same "
        "values."
    )


def _describe(first: list[dict[str, Any]], rank: int, other: list[dict[str, Any]]) -> str:
    """Return the first number in which rank 0 and another rank differ."""
    for group, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        for key in (*ours, *theirs):
            if ours.get(key) != theirs.get(key):
                return (
                    f"rank 0 steps with {key}={ours.get(key)}, rank {rank} with "
                    f"{key}={theirs.get(key)} (group {group}){call_site()}. If a scheduler saw "
                    "another number on each rank, step it with what run.evaluate or "
                    "run.forward_backward returns: those are the same on all ranks."
                )
    return f"rank 0 has {len(first)} optimizer groups, rank {rank} has {len(other)}{call_site()}."
