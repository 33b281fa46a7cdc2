"""Schedule tables: for each rank its actions in order, as plain data.

`shoal schedule` draws the table that the executor runs, so a drawing cannot differ from a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; backward for inputs only; backward for weights only, at any time after I."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int  # of the model, from 0
    microbatch: int  # from 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class ScheduleTable:
    """The actions of all ranks. Their times follow from their dependencies.

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
        """Return the stages of a rank, ascending."""
        return sorted({action.stage for action in self.rows[rank]})

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return self._ranks[stage]

    def has(self, action: Action) -> bool:
        """Return whether some rank takes this action."""
        return action in self._actions

    def dependencies(self, action: Action) -> list[Action]:
        """Return the actions, of any rank, that must be done before `action`."""
        kind, stage, microbatch = action
        if kind == "F":
            return [Action("F", stage - 1, microbatch)] if stage else []
        if kind == "W":
            return [Action("I", stage, microbatch)]
        forward = Action("F", stage, microbatch)
        if stage == self.num_stages - 1:
            return [forward]
        next_kind: Kind = "B" if self.has(Action("B", stage + 1, microbatch)) else "I"
        return [forward, Action(next_kind, stage + 1, microbatch)]

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    @cached_property
    def _actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)


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
    assert sum(counts.values()) == sum(1 for _ in topological_order(table)), (
        f"{table.name}: ranks wait for each other"
    )


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


def topological_order(table: ScheduleTable) -> Sequence[tuple[int, Action]]:
    """Return (rank, action) pairs, each after its dependencies.

    Actions that can never run are left out: the result is shorter than the table if ranks deadlock.
    """
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    next_index = [0] * table.num_ranks
    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(table.rows):
            while next_index[rank] < len(row):
                action = row[next_index[rank]]
                if not all(dependency in done for dependency in table.dependencies(action)):
                    break
                done.add(action)
                order.append((rank, action))
                next_index[rank] += 1
                progressed = True
    return order
