"""Numbers that a script keeps from one call of `compute_loss` to the next.

      self.step += 1     self.tau *= 0.99     nonlocal beta     in a model, a criterion, a closure

On one device a step calls the function once. With micro-batches it is called several times, so each
call finds the numbers with which the step began, and afterwards they are those of one call. What
follows from the samples, such as a number of samples seen, is added up over the micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from shoal.data.tree_map import tensors_in
from shoal.run.kept_tensors import KeptTensors
from shoal.run.places import Place, places_of
from shoal.strategies.base import LocalBatch
from shoal.strategies.module_snapshot import is_trial_running

_Number = int | float
_At = tuple[int, Any]
"""The id of a holder, and the key in it."""


class KeptNumbers:
    """Gives each micro-batch of a step the numbers with which the step began.

    It looks for numbers that change in the steps 1, 2, 4, 8, ...

    Args:
        models: the prepared models, which may become more.
        accumulate: micro-batches of a step.
        in_stages: they go through a pipeline, where a function runs several times for each.
    """

    def __init__(self, models: Sequence[nn.Module], accumulate: int, in_stages: bool) -> None:
        self._models = models
        self._in_parts = accumulate > 1 or in_stages
        self._in_stages = in_stages
        self._tensors: KeptTensors | None = None
        self._steps = 0
        self._searched: dict[_At, tuple[Place, _Number]] = {}
        self._changing: dict[_At, Place] = {}
        self._begin: dict[_At, _Number | None] = {}
        self._added: dict[_At, _Number] = {}
        self._left: set[_At] = set()

    def begin_step(self, batch: LocalBatch) -> LocalBatch:
        """Return the batch with a function that begins with the numbers of this moment."""
        if not self._in_parts:
            return batch
        function = batch.compute_loss
        self._steps += 1
        self._searched, self._added, self._tensors = {}, {}, None
        if not self._steps & (self._steps - 1):
            places = list(places_of(function, self._models))
            numbers = ((place, _number_at(place)) for place in places)
            self._searched = {
                (id(p.holder), p.key): (p, number) for p, number in numbers if number is not None
            }
            self._tensors = None if self._in_stages else KeptTensors(places)
        self._begin = {at: _number_at(place) for at, place in self._changing.items()}

        @functools.wraps(function)  # strategies know functions by their names
        def begins_alike(*args: Any, **kwargs: Any) -> Any:
            if is_trial_running():  # which puts back what it changes
                return function(*args, **kwargs)
            before = self._put_back()
            if self._tensors is not None:
                self._tensors.begin_call()
            try:
                return function(*args, **kwargs)
            finally:
                self._look()
                self._settle(before, (args, kwargs))
                if self._tensors is not None:
                    self._tensors.end_call()

        return batch._replace(compute_loss=begins_alike)

    def _put_back(self) -> dict[_At, _Number | None]:
        """Put numbers back to the step's beginning. Returns what they were before this call."""
        before = {at: _number_at(place) for at, place in self._changing.items()}
        for at, place in self._changing.items():
            number = self._begin.get(at)
            if number is not None and before[at] is not None and before[at] != number:
                place.write(number)
        return before

    def _look(self) -> None:
        """Find numbers that the first call has changed."""
        for at, (place, number) in self._searched.items():
            if at not in (*self._changing, *self._left) and _number_at(place) not in (number, None):
                self._changing[at] = place
                self._begin[at] = number

    def _settle(self, before: dict[_At, _Number | None], batch: Any) -> None:
        """Leave numbers alone from now on that follow from samples: calls add to them."""
        if self._in_stages:
            return
        rows = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)
        for at, place in list(self._changing.items()):
            begin, now, earlier = self._begin.get(at), _number_at(place), before.get(at)
            if begin is None or now is None:
                continue
            added = now - begin
            follows_rows = added == rows > 1 or self._added.get(at, added) != added
            self._added[at] = added
            if follows_rows:
                self._left.add(at)
                del self._changing[at]
                if earlier is not None and earlier != begin:
                    place.write(earlier + added)


def _number_at(place: Place) -> _Number | None:
    value = place.read()
    return value if type(value) in (int, float) else None
