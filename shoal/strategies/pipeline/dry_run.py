"""A dry run: the user's function with all units absent. It tells what crosses each cut.

A value crosses a cut if it is made before it and used behind it. Skips, encoder outputs and
position biases are no special cases. A dry run computes nothing on the units of the model; every
rank makes its own, once for each shape of the batch, and compares a digest with the other ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shoal.strategies.pipeline.absent import (
    StageDone,
    ValueName,
    WalkRefusal,
    absent_of,
    tensors_of_result,
)
from shoal.strategies.pipeline.meta_call import OutputForms
from shoal.strategies.pipeline.stage_map import Crossing, StageMap
from shoal.strategies.pipeline.units import Units
from shoal.strategies.pipeline.walk import Walk


class DryRun(Walk):
    """One run of a function, in which all units are absent.

    Attributes:
        parameter_users: name of a parameter -> stages in which code around units uses it.
    """

    def __init__(self, units: Units, forms: OutputForms, stage_map: StageMap) -> None:
        super().__init__(units, forms, stage_map, None)
        self.parameter_users: dict[str, set[int]] = {}
        self._stage_made: dict[ValueName, int] = {}
        self._size_bytes: dict[ValueName, int] = {}
        self._stage_used: dict[ValueName, int] = {}
        self._paths: list[tuple[int, str]] = []

    def run(self, function: Callable[[], Any]) -> Crossing:
        """Run the function.

        Raises: WalkRefusal: it cannot be divided.
        """
        try:
            with self.units.observed_by(self), self:
                result = [*tensors_of_result(function())]
                self.end()
                self._use(result)
        except StageDone:
            pass
        except WalkRefusal:
            # Behind the last unit the rank of the last stage has all values.
            if not self._is_behind_last_unit():
                raise
        self.pass_to(self.stage_map.last, "the end")
        return self._crossing()

    def _refuse_look(self, label: str) -> None:
        if self._is_behind_last_unit():
            raise StageDone
        super()._refuse_look(label)

    def _is_behind_last_unit(self) -> bool:
        calls = self.stage_map.stages
        if self._turns.total() >= len(calls):
            return True
        # A layer before it may have been left out by a random number.
        *_, last = calls
        return self._turns[last.unit] > last.turn

    def _event(self, label: str, used: Sequence[Any]) -> None:
        super()._event(label, used)
        self._use(used)

    def _use(self, used: Sequence[Any]) -> None:
        """Note in which stage these values are used."""
        for value in used:
            absent = absent_of(value)
            if absent is not None:
                self._stage_used[absent.value_name] = self.at
            elif isinstance(value, Tensor) and id(value) in self.units.parameters:
                name = self.units.parameters[id(value)]
                self.parameter_users.setdefault(name, set()).add(self.at)

    def _made(self, name: ValueName, value: Tensor) -> None:
        self._stage_made[name] = self.at
        self._size_bytes[name] = value.numel() * value.element_size()

    def crossing_bytes(self) -> list[int]:
        """Return for each cut the bytes that cross it."""
        return [sum(self._size_bytes[name] for name in names) for names in self._crossing().names]

    def _leave_stage(self, last: str) -> None:
        self._paths.append((self._path, last))

    def _crossing(self) -> Crossing:
        names = [
            sorted(
                name
                for name, used in self._stage_used.items()
                if self._stage_made.get(name, used) <= cut < used
            )
            for cut in range(self.stage_map.last)
        ]
        makers = [[self.labels[name.event - 1] for name in of_cut] for of_cut in names]
        return Crossing(names, makers, self._paths)


def digest(crossing: Crossing) -> int:
    """Return a checksum of a dry run, to compare with those of other ranks."""
    return zlib.crc32(repr((crossing.names, crossing.makers, crossing.paths)).encode())
