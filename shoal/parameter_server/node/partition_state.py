"""One part on a server: its numbers, the optimizer that steps them, and how many updates they
have taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parameter_server.optimizer_spec import OptimizerSpec, Settings, update
from shoal.parameter_server.partitioning import Partition


class PartitionState:
    """A part, stepped as a whole. Parameters without a gradient are left alone, as an optimizer
    leaves them.

    Attributes:
        values: flat, of the part's length and dtype; in memory of the caller's, if given.
        clock: updates taken.
    """

    def __init__(
        self, part: Partition, recipe: OptimizerSpec, values: Tensor | None = None
    ) -> None:
        self.part, self.clock = part, 0
        self.values = torch.zeros(part.length, dtype=part.dtype) if values is None else values
        self.parameters = [
            nn.Parameter(self.values[s.offset : s.offset + s.length]) for s in part.segments
        ]
        self.optimizer = recipe.build(self.parameters, part.group)

    def apply(self, gradient: Tensor, present: bytes, settings: Settings) -> None:
        """One step of the optimizer.

        Args:
            gradient: flat, as `values`.
            present: for each segment 1 where it has a gradient, else 0.
        """
        for parameter, segment, there in zip(
            self.parameters, self.part.segments, present, strict=True
        ):
            parameter.grad = (
                gradient[segment.offset : segment.offset + segment.length] if there else None
            )
        update(self.optimizer, settings)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.clock += 1

    def state(self) -> list[dict[str, Any]]:
        """What the optimizer keeps for each segment: tensors of its length or scalars, and
        plain numbers.
        """
        return [dict(self.optimizer.state.get(parameter, {})) for parameter in self.parameters]

    @torch.no_grad()
    def load(self, values: Tensor, state: list[Mapping[str, Any]], clock: int) -> None:
        """The inverse: begin at these numbers, with this state; an empty one where there was no
        step yet.
        """
        self.values.copy_(values)
        self.optimizer.state.clear()
        for parameter, kept in zip(self.parameters, state, strict=True):
            if kept:
                self.optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in kept.items()
                }
        self.clock = clock
