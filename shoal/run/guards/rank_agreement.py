"""Agreement of ranks: numbers, values, batches and weights that must be the same on all of them.

numbers of groups    such as learning rates: a scheduler may see each rank's own loss
loaded values        load_state_dict by one rank loads its part alone
batches              must have been shares of the same global batches, of the same samples
weights              of ranks that hold the same part of the model, to the last bit:

      model.head.reset_parameters()      each data rank draws other numbers
      if run.rank == 0: load(...)        one rank alone has the file
      p.grad = gradient of own rows      each rank steps by another one

Nothing would bring such weights together again: means of gradients keep their distance. Ranks
compare at steps 1, 2, 4, ... 64 of an optimizer, and then at every 64th. Not with the totals of
every step: those are summed, so that a difference needs numbers of their own, and on a GPU a look
at them waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from typing import Any

from torch.optim import Optimizer

from shoal.comm.norm import to_local
from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.run.batch_size import OTHER_DATA, BatchHistory, BatchPlaces, batches_differ
from shoal.run.guards.guarded_models import GuardedModels
from shoal.run.optimizer_binding import group_settings
from shoal.run.replica_check import find_differences, replicated_tensors

LONGEST_INTERVAL = 64
"""Steps between two comparisons, at most."""
SCHEDULER_CURE = (
    "If a scheduler saw another number on each rank, step it with what run.evaluate or "
    "run.forward_backward returns: those are the same on all ranks."
)


def guard_agreement(
    guarded: GuardedModels,
    undo: ExitStack,
    with_weights: bool,
    batches: BatchHistory,
    at: Callable[[str], AbstractContextManager[None]],
) -> None:
    """Compare what ranks must have alike before steps of each optimizer, until `undo` is closed.

    Args:
        with_weights: compare the weights too.
        batches: that steps were computed on.
        at: a context for a collective call of that name.
    """

    def comparing() -> Callable[..., None]:
        steps, rates = count(1), 0

        def compare(optimizer: Optimizer, *_: Any) -> None:
            nonlocal rates
            step = next(steps)
            # Ranks that lower their rates one after the other have the same ones afterwards.
            rates = hash((rates, *map(_rate_of, optimizer.param_groups)))
            if step % LONGEST_INTERVAL and (step & (step - 1) or step > LONGEST_INTERVAL):
                return
            with at("optimizer.step()"):
                _compare(guarded, optimizer, batches, rates)
                if with_weights:
                    check_equal_weights(guarded)

        return compare

    # Ranks that step by themselves may be at different steps.
    if guarded.mesh.size > 1 and guarded.local_model.strategy_state.is_synchronous:
        for optimizer in guarded.optimizers:
            undo.callback(optimizer.register_step_pre_hook(comparing()).remove)


def _rate_of(group: dict[str, Any]) -> float:
    rate = group.get("lr")
    return rate if isinstance(rate, int | float) else 0.0


def _compare(
    guarded: GuardedModels, optimizer: Optimizer, batches: BatchHistory, rates: int
) -> None:
    """Raise UsageError on all ranks if numbers, loaded values or batches differ. Collective.

    Args: rates: digest of the learning rates of all steps so far.
    """
    phase = guarded.phase
    own = [group_settings(optimizer), rates, batches.places, phase.loaded]
    first, *others = guarded.mesh.all_gather_json(own)
    groups, first_rates, places, loaded_by_first = first
    for rank, (other_groups, other_rates, other_places, loaded_by_other) in enumerate(others, 1):
        if other_groups != groups:
            raise UsageError(_describe(groups, rank, other_groups))
        if other_rates != first_rates:
            fact = f"rank 0 and rank {rank} have stepped with other learning rates in a step before"
            raise UsageError(f"{fact}{call_site()}. {SCHEDULER_CURE}")
        if loaded_by_other != loaded_by_first:
            raise UsageError(_describe_loaded(loaded_by_first, rank, loaded_by_other))
        ours, theirs = BatchPlaces(*places), BatchPlaces(*other_places)
        fact, cure = batches_differ(ours, rank, theirs)
        if fact:
            raise UsageError(f"{fact}{call_site()}. {cure}")
        if ours.data != theirs.data:
            guarded.note_once(OTHER_DATA, epoch=ours.epoch)
    phase.loaded = 0


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
                    f"{key}={theirs.get(key)} (group {group}){call_site()}. {SCHEDULER_CURE}"
                )
    return f"rank 0 has {len(first)} optimizer groups, rank {rank} has {len(other)}{call_site()}."


def check_equal_weights(guarded: GuardedModels) -> None:
    """Compare the weights of ranks that hold the same. Collective over the data axis.

    Weights that are not finite on some rank are left to the checks that look for these.

    Raises: UsageError: on every rank of the data axis, a weight differs.
    """
    model, data = guarded.local_model, guarded.mesh.data
    state = model.strategy_state
    if data.size == 1 or state.remote_optimizer is not None or not state.is_synchronous:
        return
    held = replicated_tensors(model, (), guarded.mesh)
    differences = find_differences(held, data)
    if differences:
        is_finite = all(bool(to_local(entry.value).isfinite().all()) for entry in held)
        if not data.on_any_rank(not is_finite):
            name, (first, other, *_) = next(iter(differences.items()))
            raise UsageError(
                f"{name} has other values on data rank {other[0]} than on data rank {first[0]}, "
                f"noticed{call_site() or ' now'}: the script has written it on one of them, or "
                "differently on each. Draw weights anew under one seed, torch.manual_seed(epoch) "
                "on all ranks, for after run.prepare torch draws other numbers on each data rank; "
                "load weights on all ranks; give a layer that is new to run.prepare(model, "
                "optimizer); and take gradients from run.forward_backward alone."
            )
