"""State of one partition on a server: its values, its optimizer, and its clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
                self.optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in segment_state.items()
                }
        self.clock = clock
