"""The exponential moving average of the weights: smoother than the weights themselves, so evaluated
in their place.

      average <- decay * average + (1 - decay) * weights        after every step (Polyak & Juditsky, 1992)

Early on the decay is (1 + steps) / (10 + steps), so that the average does not remember the initial
weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.platform.torch_private.kernels import foreach_lerp_


class Ema:
    """The average of parameters. Every rank keeps its own; equal weights give equal averages.

    Args:
        parameters: by name: a model's, or what this rank holds of them.
        decay: in (0, 1); 0.999 remembers about a thousand steps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay, self.steps = decay, 0
        self._weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self._average = {name: weight.clone() for name, weight in self._weights.items()}

    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        if not self._average:  # a stage of a pipeline may have none
            return
        # What this rank holds of them: torch takes no lists of shards and wholes.
        average, weights = (
            [to_local(value) for value in held.values()] for held in (self._average, self._weights)
        )
        foreach_lerp_(average, weights, 1 - decay)

    def broadcast(self, mesh: Mesh) -> None:
        """Every rank takes rank 0's average. Collective."""
        for average in self._average.values():
            mesh.broadcast_tensor(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model's parameters are the averages."""
        own = {name: weight.clone() for name, weight in self._weights.items()}
        self._copy(self._average)
        try:
            yield
        finally:
            self._copy(own)

    def state(self) -> dict[str, Tensor]:
        """The averages under `ema.NAME`, and how many steps they hold."""
        return {f"ema.{name}": value for name, value in self._average.items()} | {
            "ema_steps": torch.tensor(self.steps)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        self.steps = int(tensors["ema_steps"])
        for name, value in self._average.items():
            value.copy_(tensors[f"ema.{name}"])

    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])
