"""Schedules: functions that make the table of each rank's actions, as plain data.

`shoal schedule` draws the table that the executor runs, so a drawing cannot differ from a run.

The tables of `interleaved`, `zero-bubble` and `zbv` come from torch.distributed.pipelining. `gpipe`
and `1f1b` are made here: torch runs them without a table, and the table that it draws for 1F1B
(2.13) gives the last rank micro-batches 1 to m instead of 0 to m - 1.

In the drawings a row is a rank, and a column is the time of one forward pass through a stage. f3
is the forward pass of micro-batch 3, b3── its backward pass, i3 and w3 its two halves; capitals are
the rank's second stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from shoal.costs.pass_table import Action, PassTable
from shoal.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class ScheduleTable(PassTable):
    """The actions of all ranks. Their times follow from their dependencies.

    Attributes: num_stages: of the model; a multiple of the ranks.
    """

    name: str
    num_stages: int
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, ascending."""
        return sorted(self.stages[rank])

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return next(rank for rank, stages in enumerate(self.stages) if stage in stages)


def check(table: ScheduleTable) -> None:
    """Assert that a table is complete and cannot deadlock.

    Each stage is on one rank, and computes each micro-batch forward and backward once. Some tables
    come from another library, so every table is checked before it is run.
    """
    counts = Counter(action for row in table.rows for action in row)
    twice = [str(action) for action, count in counts.items() if count > 1]
    assert not twice, f"{table.name}: {', '.join(twice)} stand there more than once"
    for stage in range(table.num_stages):
        _check_stage(table, stage, counts)
    assert sum(counts.values()) == len(table.order), f"{table.name}: ranks wait for each other"


def _check_stage(table: ScheduleTable, stage: int, counts: Counter[Action]) -> None:
    ranks = [
        rank for rank, row in enumerate(table.rows) if any(action.stage == stage for action in row)
    ]
    assert len(ranks) == 1, f"{table.name}: stage {stage} is on ranks {ranks}"
    for microbatch in range(table.num_microbatches):
        kinds = {kind for kind in "FBIW" if (kind, stage, microbatch) in counts}
        assert kinds in ({"F", "B"}, {"F", "I", "W"}), (
            f"{table.name}: {kinds} of {microbatch} in stage {stage}"
        )


Rows = list[list[Action]]


def naive(ranks: int, microbatches: int, per_rank: int = 1) -> Rows:
    """One micro-batch: one rank computes, all others wait.

    rank 0  f0 · · · · · · · · ·b0──
    rank 1   ·f0 · · · · · ·b0── · ·
    rank 2   · ·f0 · · ·b0── · · · ·
    rank 3   · · ·f0b0── · · · · · ·
    """
    return gpipe(ranks, microbatches, per_rank)


def gpipe(ranks: int, microbatches: int, per_rank: int = 1) -> Rows:
    """GPipe: all micro-batches forward, then all backward.

    Each rank holds the activations of all micro-batches at once.

        rank 0  f0f1f2f3 · · · · · · · · ·b0──b1──b2──b3──
        rank 1   ·f0f1f2f3 · · · · · ·b0──b1──b2──b3── · ·
        rank 2   · ·f0f1f2f3 · · ·b0──b1──b2──b3── · · · ·
        rank 3   · · ·f0f1f2f3b0──b1──b2──b3── · · · · · ·

    Source: Huang et al., NeurIPS 2019.
    """
    return [_row(rank, microbatches, microbatches) for rank in range(ranks)]


def one_forward_one_backward(ranks: int, microbatches: int, per_rank: int = 1) -> Rows:
    """1F1B: one forward pass for each later stage, then forward and backward passes by turns.

    A step takes as long as with gpipe, but a rank holds at most as many micro-batches as there are
    stages.

        rank 0  f0f1f2f3 · · · · · ·b0── ·b1── ·b2── ·b3──
        rank 1   ·f0f1f2 · · · ·b0──f3b1── ·b2── ·b3── · ·
        rank 2   · ·f0f1 · ·b0──f2b1──f3b2── ·b3── · · · ·
        rank 3   · · ·f0b0──f1b1──f2b2──f3b3── · · · · · ·

    Source: Narayanan et al., SC 2021 (PipeDream-Flush).
    """
    return [_row(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks)]


def interleaved(ranks: int, microbatches: int, per_rank: int = 2) -> Rows:
    """Interleaved 1F1B: rank r holds stages r, r + ranks, r + 2 * ranks, ...

    Stages are shorter, so ranks are idle for a shorter time at the begin and end of a step. In
    return, more is sent.

        rank 0  f0f1f2f3F0F1F2F3 · · · · · ·B0── ·B1── ·B2── ·B3──b0──b1──b2──b3──
        rank 1   ·f0f1f2f3F0F1F2F3 · · ·B0── ·B1── ·B2── ·B3──b0──b1──b2──b3── · ·
        rank 2   · ·f0f1f2f3F0F1F2 ·B0──F3B1── ·B2── ·B3──b0──b1──b2──b3── · · · ·
        rank 3   · · ·f0f1f2f3F0B0──F1B1──F2B2──F3B3──b0──b1──b2──b3── · · · · · ·

    Source: Narayanan et al., SC 2021.
    """
    return _torch_rows("Interleaved1F1B", ranks, microbatches, per_rank)


def zero_bubble(ranks: int, microbatches: int, per_rank: int = 1) -> Rows:
    """Zero bubble: 1F1B with a split backward pass.

    No rank waits for the half that computes gradients of weights, so it fills idle time.

        rank 0  f0f1f2f3 · · ·i0w0i1w1i2w2i3w3
        rank 1   ·f0f1f2 · ·i0f3i1w0i2w1i3w2w3
        rank 2   · ·f0f1 ·i0f2i1f3i2w0i3w1w2w3
        rank 3   · · ·f0i0f1i1f2i2f3i3w0w1w2w3

    Source: Qi et al., ICLR 2024 (ZB-H1).
    """
    return _torch_rows("InterleavedZeroBubble", ranks, microbatches, per_rank)


def zbv(ranks: int, microbatches: int, per_rank: int = 2) -> Rows:
    """Zero bubble in the shape of a V: the rank of the first stage also holds the last one.

        rank 0  f0f1f2f3 · · ·F0I0W0F1I1W1F2I2W2F3I3W3i0w0 ·i1w1 ·i2w2 ·i3w3
        rank 1   ·f0f1f2f3 ·F0 ·F1I0W0F2I1W1F3I2W2i0w0I3W3i1w1 ·i2w2 ·i3w3 ·
        rank 2   · ·f0f1f2F0f3F1 ·F2I0W0F3I1W1i0w0I2W2i1w1I3W3i2w2 ·i3w3 · ·
        rank 3   · · ·f0F0f1F1f2F2f3F3I0W0i0w0I1W1i1w1I2W2i2w2I3W3i3w3 · · ·

    Source: Qi et al., ICLR 2024 (ZB-V).
    """
    return _torch_rows("ZBVZeroBubble", ranks, microbatches, per_rank)


class Schedule(NamedTuple):
    """One kind of table.

    Attributes:
        make_rows: (ranks, microbatches, stages per rank) -> rows.
        per_rank: default number of stages on each rank.
        fixed: the number of stages on each rank cannot be chosen.
    """

    make_rows: Callable[[int, int, int], Rows]
    per_rank: int
    fixed: bool


SCHEDULES = {
    "naive": Schedule(naive, 1, True),
    "gpipe": Schedule(gpipe, 1, True),
    "1f1b": Schedule(one_forward_one_backward, 1, True),
    "interleaved": Schedule(interleaved, 2, False),
    "zero-bubble": Schedule(zero_bubble, 1, False),
    "zbv": Schedule(zbv, 2, True),
}


def problems(name: str, ranks: int, microbatches: int, per_rank: int = 0) -> list[str]:
    """Return the reasons why there is no such table; an empty list if there is one."""
    if name not in SCHEDULES:
        return [f"schedule={name} is not known; {did_you_mean(name, SCHEDULES)}"]
    if ranks < 1 or microbatches < 1 or per_rank < 0:
        return [
            f"pipeline={ranks}, microbatches={microbatches}, stages={per_rank}: give whole "
            "positive numbers"
        ]
    result = []
    schedule = SCHEDULES[name]
    if schedule.fixed and per_rank not in (0, schedule.per_rank):
        result.append(
            f"schedule={name} holds {schedule.per_rank} on each rank; stages={per_rank} is for "
            "interleaved"
        )
    if name == "naive" and microbatches != 1:
        result.append(
            f"schedule=naive has one micro-batch, not {microbatches}; with several it is "
            "schedule=gpipe"
        )
    rounds = max(1, microbatches // ranks)
    if name in ("interleaved", "zero-bubble") and microbatches % rounds:
        lower = microbatches // ranks * ranks
        result.append(
            f"schedule={name} takes micro-batches in rounds of {ranks} ranks, and {microbatches} "
            f"make no whole rounds; use microbatches={lower} or {lower + ranks}"
        )
    return result


@lru_cache(maxsize=64)
def table(name: str, ranks: int, microbatches: int, per_rank: int = 0) -> ScheduleTable:
    """Make the table of a schedule.

    Args:
        name: one of SCHEDULES.
        ranks: of one pipeline.
        microbatches: of one step, on each rank.
        per_rank: stages on each rank; 0 for the schedule's default.

    Raises: ConfigError: there is no such table.
    """
    if reasons := problems(name, ranks, microbatches, per_rank):
        raise ConfigError(*reasons)
    schedule = SCHEDULES[name]
    per_rank = per_rank or schedule.per_rank
    rows = schedule.make_rows(ranks, microbatches, per_rank)
    result = ScheduleTable(tuple(map(tuple, rows)), name, ranks * per_rank, microbatches)
    check(result)
    return result


def _row(stage: int, warm_up: int, microbatches: int) -> list[Action]:
    """Return the actions of a rank with `warm_up` forward passes before its first backward."""
    row = [Action("F", stage, m) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        row += [Action("F", stage, m), Action("B", stage, m - warm_up)]
    return row + [Action("B", stage, m) for m in range(microbatches - warm_up, microbatches)]


def _torch_rows(name: str, ranks: int, microbatches: int, per_rank: int) -> Rows:
    """Return the table that a schedule class of torch.distributed.pipelining computes."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    # The table depends on the numbers of ranks, stages and micro-batches alone, so what a schedule
    # reads of a PipelineStage is enough. All stages of rank 0 are given; torch makes all rows.
    schedule: Any = get_schedule_class(name)
    num_stages = ranks * per_rank
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            submod=None,
            stage_index_to_group_rank={},
        )
        for index in range(0, num_stages, ranks)
    ]
    order = schedule(stages, microbatches).pipeline_order
    return [
        [
            Action(a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in order[rank]
            if a is not None  # torch writes None for idle time
        ]
        for rank in range(ranks)
    ]
