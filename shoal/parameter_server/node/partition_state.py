"""State of one partition on a server.

PartitionState    values, optimizer and clock
GradientSum       the sum of gradients in one synchronous step, and queries about it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.parameter_server.events import GradNormResponse, GradResponse
from shoal.parameter_server.optimizer_spec import OptimizerSpec, Settings, update
from shoal.parameter_server.partitioning import Partition


class PartitionState:
    """A partition, which one call of its optimizer steps.

    Parameters without a gradient are left unchanged, as torch's optimizers leave them.

    Args:
        values: memory for the values; new memory by default.

    Attributes:
        part: the partition.
        values: flat, of the partition's length and dtype.
        clock: updates taken.
    """

    def __init__(
        self, part: Partition, recipe: OptimizerSpec, values: Tensor | None = None
    ) -> None:
        self.part = part
        self.clock = 0
        self.values = torch.zeros(part.length, dtype=part.dtype) if values is None else values
        # Each segment is a parameter of its own, on the memory of `values`.
        self.parameters = [
            nn.Parameter(self.values[segment.offset : segment.offset + segment.length])
            for segment in part.segments
        ]
        self.optimizer = recipe.build(self.parameters, part.group)

    def apply(self, gradient: Tensor, present: bytes, settings: Settings) -> None:
        """Take one step of the optimizer.

        Args:
            gradient: flat, of the partition's length and dtype.
            present: a byte for each segment: 1 where it has a gradient, else 0.
            settings: of the partition's optimizer group, in this step.
        """
        for parameter, segment, has_gradient in zip(
            self.parameters, self.part.segments, present, strict=True
        ):
            end = segment.offset + segment.length
            parameter.grad = gradient[segment.offset : end] if has_gradient else None
        update(self.optimizer, settings)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.clock += 1

    def state(self) -> list[dict[str, Any]]:
        """Return the optimizer's state of each segment: flat tensors, scalars and plain numbers."""
        return [dict(self.optimizer.state.get(parameter, {})) for parameter in self.parameters]

    @torch.no_grad()
    def load(self, values: Tensor, state: list[Mapping[str, Any]], clock: int) -> None:
        """Replace values, optimizer state and clock.

        Args:
            state: as `state` returns it; of a segment without a step an empty one.
        """
        self.values.copy_(values)
        self.optimizer.state.clear()
        for parameter, segment_state in zip(self.parameters, state, strict=True):
            if segment_state:
                self.optimizer.state[parameter] = cloned(segment_state)
        self.clock = clock


def cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a segment's optimizer state, which does not change with the next step."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
    }


class Push(NamedTuple):
    """A worker's gradient of one partition, flat, with a byte of `present` for each segment."""

    step: int
    gradient: Tensor
    present: bytes
    sparse: bool = False


@dataclass
class GradientSum:
    """Sum of gradients of one step of one partition, added by worker id, so that the bits do not
    depend on the order of arrival. The gradients themselves are read and never changed.

    Args:
        memory: for the sum, of the partition's length; it is used again in the next step.

    Attributes:
        waiting: worker -> push that has arrived before one of a lower worker id.
        added: workers whose gradients are in the sum.
        first: gradient of the first worker. With one worker it is the sum, without a copy.
        present: for each segment 1 where any of the gradients has one.
        sparse: all gradients so far are sparse.
    """

    memory: Tensor | None = None
    waiting: dict[int, Push] = field(default_factory=dict)
    added: list[int] = field(default_factory=list)
    first: Tensor | None = None
    present: bytes = b""
    sparse: bool = True

    def add(self, worker: int, push: Push, workers: Sequence[int]) -> None:
        """Take a push, and add all gradients whose turn has come. A repeated push is ignored.

        Args:
            workers: all worker ids, in the order of the sum.
        """
        if worker in self.added:
            return
        self.waiting[worker] = push
        for worker_id in workers[len(self.added) :]:
            if worker_id not in self.waiting:
                return
            next_push = self.waiting.pop(worker_id)
            self.sparse = self.sparse and next_push.sparse
            if self.first is None:
                self.first = next_push.gradient
                self.present = next_push.present
            else:
                self._add(next_push.gradient)
                self.present = bytes(map(max, self.present, next_push.present))
            self.added.append(worker_id)

    def _add(self, gradient: Tensor) -> None:
        assert self.first is not None
        if self.memory is None:
            self.memory = torch.empty_like(self.first)
        torch.add(self.first if len(self.added) == 1 else self.memory, gradient, out=self.memory)

    def total(self) -> Tensor:
        """Return the sum of the gradients that were added, at least one."""
        total = self.first if len(self.added) == 1 else self.memory
        assert total is not None
        return total


class GradientQuery(NamedTuple):
    """A worker's query about the sum of a partition's gradients in a step."""

    worker: int
    step: int
    part: int
    wants_tensor: bool  # else it wants the sum of the squares


def respond(query: GradientQuery, sum_: GradientSum) -> GradResponse | GradNormResponse:
    """Return the answer to a query; the sum is complete."""
    total = sum_.total()
    if query.wants_tensor:
        return GradResponse(query.worker, query.part, total, sum_.present)
    return GradNormResponse(query.worker, query.part, float(total.double().square().sum()))
