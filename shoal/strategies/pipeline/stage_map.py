"""The stages of the calls of units, and the values that cross the cuts between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.strategies.pipeline.absent import ValueName
from shoal.strategies.pipeline.units import UnitCall


class StageMap(NamedTuple):
    """The stages of all calls of units in a run on a sample.

    Attributes:
        names: of units, in the order of the model.
        stages: call -> stage; calls in the order of the sample.
    """

    names: Sequence[str]
    stages: Mapping[UnitCall, int]
    last: int

    def stage_of(self, name: str, turn: int) -> int:
        """Return the stage of a call. A call that the sample did not make is beside the ones
        before it.
        """
        stage = self.stages.get(UnitCall(name, turn))
        if stage is not None:
            return stage
        for earlier in range(turn - 1, -1, -1):
            stage = self.stages.get(UnitCall(name, earlier))
            if stage is not None:
                return stage
        place = self.names.index(name)
        before = (self.stages.get(UnitCall(other, 0)) for other in reversed(self.names[:place]))
        return next((stage for stage in before if stage is not None), 0)


class Crossing(NamedTuple):
    """The values that cross the cuts for one shape of the batch.

    Attributes:
        names: for each cut the names of the values.
        makers: for each cut the labels of the events that made them, for messages.
        paths: for each cut the checksum of the events before it, and the label of the last one.
    """

    names: list[list[ValueName]]
    makers: list[list[str]]
    paths: list[tuple[int, str]]
