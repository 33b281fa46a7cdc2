"""A schedule as plain data: for each rank the actions that it takes, in order. What is drawn is
what is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; backward for the inputs alone; backward for the weights alone, at any time
after I.
"""


class Action(NamedTuple):
    """One piece of work of one rank."""

    kind: Kind
    stage: int  # of the model, from 0
    microbatch: int  # from 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class ScheduleTable:
    """Who computes what in which order; when, follows from what each action waits for.

    Attributes:
        rows: for each rank its actions, in order.
        num_stages: of the model; a multiple of the ranks.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return sorted({action.stage for action in self.rows[rank]})

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self._homes[stage]

    def dependencies(self, action: Action) -> list[Action]:
        """What must be done before `action`, on whatever rank."""
        kind, stage, microbatch = action
        if kind == "F":
            return [Action("F", stage - 1, microbatch)] if stage else []
        if kind == "W":
            return [Action("I", stage, microbatch)]
        own = Action("F", stage, microbatch)
        if stage == self.num_stages - 1:
            return [own]
        after: Kind = "B" if Action("B", stage + 1, microbatch) in self._all else "I"
        return [own, Action(after, stage + 1, microbatch)]

    @cached_property
    def _homes(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    @cached_property
    def _all(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)


def check(table: ScheduleTable) -> None:
    """Assert that every stage takes every micro-batch forward and backward once, on one rank, and
    that nobody waits for
    ever: a table made by another library is looked at before it is run."""
    counts = Counter(action for row in table.rows for action in row)
    twice = [str(action) for action, count in counts.items() if count > 1]
    assert not twice, f"{table.name}: {', '.join(twice)} stand there more than once"
    for stage in range(table.num_stages):
        _check_stage(table, stage, counts)
    assert sum(counts.values()) == sum(1 for _ in topological_order(table)), (
        f"{table.name}: ranks wait for each other"
    )


def _check_stage(table: ScheduleTable, stage: int, counts: Counter[Action]) -> None:
    homes = [
        rank for rank, row in enumerate(table.rows) if any(action.stage == stage for action in row)
    ]
    assert len(homes) == 1, f"{table.name}: stage {stage} is on ranks {homes}"
    for microbatch in range(table.num_microbatches):
        kinds = {kind for kind in "FBIW" if (kind, stage, microbatch) in counts}
        assert kinds in ({"F", "B"}, {"F", "I", "W"}), (
            f"{table.name}: {kinds} of {microbatch} in stage {stage}"
        )


def topological_order(table: ScheduleTable) -> Sequence[tuple[int, Action]]:
    """All actions with their ranks, each after what it waits for; fewer than all where ranks
    wait for ever.
    """
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    next_of = [0] * table.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.rows):
            while next_of[rank] < len(row) and all(
                a in done for a in table.dependencies(row[next_of[rank]])
            ):
                action = row[next_of[rank]]
                done.add(action)
                order.append((rank, action))
                next_of[rank] += 1
                moved = True
    return order
