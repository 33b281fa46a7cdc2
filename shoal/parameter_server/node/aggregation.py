"""The sum of one part's gradients in one step, and what is asked of it before the step is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.parameter_server.events import GradNormResponse, GradResponse


class Push(NamedTuple):
    """A worker's gradient of one part."""

    step: int
    gradient: Tensor
    present: bytes
    sparse: bool = False


@dataclass
class GradientSum:
    """Gradients of one step of one part, added up in the order of workers. Pushed ones are read and
    never changed.

    Args: memory: of the part's length, for the sum; used again in the next step.
    """

    memory: Tensor | None = None
    waiting: dict[int, Push] = field(default_factory=dict)
    added: list[int] = field(default_factory=list)
    first: Tensor | None = None
    present: bytes = b""
    sparse: bool = True

    def add(self, worker: int, push: Push, workers: Sequence[int]) -> None:
        """Take a push; add what is next in order."""
        if worker in self.added:
            return
        self.waiting[worker] = push
        for number in workers[len(self.added) :]:
            if number not in self.waiting:
                return
            found = self.waiting.pop(number)
            self.sparse = self.sparse and found.sparse
            if self.first is None:
                self.first, self.present = found.gradient, found.present
            else:
                self._add(found.gradient)
                self.present = bytes(map(max, self.present, found.present))
            self.added.append(number)

    def _add(self, gradient: Tensor) -> None:
        assert self.first is not None
        if self.memory is None:
            self.memory = torch.empty_like(self.first)
        torch.add(self.first if len(self.added) == 1 else self.memory, gradient, out=self.memory)

    def total(self) -> Tensor:
        """The sum of what was added, which is at least one."""
        total = self.first if len(self.added) == 1 else self.memory
        assert total is not None
        return total


class GradientQuery(NamedTuple):
    """What a worker asks of the sum of a part's gradients in a step."""

    worker: int
    step: int
    part: int
    wants_tensor: bool  # or else the sum of the squares


def respond(question: GradientQuery, sum_: GradientSum) -> GradResponse | GradNormResponse:
    total = sum_.total()
    if question.wants_tensor:
        return GradResponse(question.worker, question.part, total, sum_.present)
    return GradNormResponse(question.worker, question.part, float(total.double().square().sum()))
