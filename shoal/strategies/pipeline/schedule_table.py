"""Schedule tables: for each rank its actions in order, as plain data.

`shoal schedule` draws the table that the executor runs, so a drawing cannot differ from a run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shoal.costs.pass_table import Action, PassTable


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
