"""The passes of a step through the stages of a pipeline: their order, and what each waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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


class OrderedPass(NamedTuple):
    """A pass behind all that it waits for.

    Attributes:
        needs: indices of the passes that must have ended, of any rank.
        is_last: the stage has no backward pass behind it.
    """

    rank: int
    action: Action
    needs: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True)
class PassTable:
    """Actions of each rank of a pipeline, for one local batch.

    Attributes: rows: for each rank its actions, in order.
    """

    rows: tuple[tuple[Action, ...], ...]

    @cached_property
    def stages(self) -> tuple[frozenset[int], ...]:
        """Stages of each rank."""
        return tuple(frozenset(action.stage for action in row) for row in self.rows)

    @cached_property
    def counts(self) -> tuple[Mapping[tuple[str, int], int], ...]:
        """For each rank, how often it passes through (kind, stage)."""
        return tuple(Counter(action[:2] for action in row) for row in self.rows)

    @cached_property
    def order(self) -> tuple[OrderedPass, ...]:
        """All passes, each behind what it waits for.

        Those that can never run are left out: it is shorter than the table if ranks deadlock.
        """
        last = {action.stage: action for row in self.rows for action in row if action.kind in "BW"}
        indices: dict[Action, int] = {}
        order: list[OrderedPass] = []
        next_index = [0] * len(self.rows)
        progressed = True
        while progressed:
            progressed = False
            for rank, row in enumerate(self.rows):
                for action in row[next_index[rank] :]:
                    needed = [indices.get(each, -1) for each in self._needs(action)]
                    if -1 in needed:
                        break
                    indices[action] = len(order)
                    is_last = last.get(action.stage) == action
                    order.append(OrderedPass(rank, action, tuple(needed), is_last))
                    next_index[rank] += 1
                    progressed = True
        return tuple(order)

    @cached_property
    def actions(self) -> frozenset[Action]:
        """The actions of all ranks."""
        return frozenset(action for row in self.rows for action in row)

    def _needs(self, action: Action) -> list[Action]:
        kind, stage, microbatch = action
        if kind == "F":
            return [Action("F", stage - 1, microbatch)] if stage else []
        if kind == "W":
            return [Action("I", stage, microbatch)]
        needed = [Action("F", stage, microbatch)]
        if Action("F", stage + 1, microbatch) in self.actions:
            whole = Action("B", stage + 1, microbatch)
            needed.append(whole if whole in self.actions else whole._replace(kind="I"))
        return needed


ONE_RANK = PassTable(((Action("F", 0, 0), Action("B", 0, 0)),))
"""The passes of a step without a pipeline."""
