"""The exponential moving average (EMA) of the weights, which is evaluated in their place.

      average <- decay * average + (1 - decay) * weights       after every step

It varies less than the weights (Polyak & Juditsky, 1992). In the first steps the decay is
(1 + steps) / (10 + steps), so that the average forgets the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.comm.assembly import shard_like
from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.platform.torch_private.kernels import foreach_lerp_


class Ema:
    """The moving average of parameters. Every rank has its own; equal weights give equal averages.

    Args:
        parameters: parameters of a model, or this rank's shards of them, by name.
        decay: in (0, 1); 0.999 averages over about a thousand steps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self._weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self._average = {name: weight.clone() for name, weight in self._weights.items()}

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Average these from now on: the same parameters, divided among ranks since.

        Tensor and pipeline parallelism divide a model with its first batch.
        """
        self._weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self._average = {
            name: shard_like(self._average[name], weight) for name, weight in self._weights.items()
        }

    def update(self) -> None:
        """Add the present weights to the average. Call it after each optimizer step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        if not self._average:  # a stage of a pipeline may have no parameters
            return
        # Local tensors, because torch takes no lists that mix DTensors and plain tensors.
        average = [to_local(value) for value in self._average.values()]
        weights = [to_local(value) for value in self._weights.values()]
        foreach_lerp_(average, weights, 1 - decay)

    def broadcast(self, mesh: Mesh) -> None:
        """Copy rank 0's average to every rank. Collective."""
        for average in self._average.values():
            mesh.broadcast_tensor(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's parameters by the averages in this context."""
        weights = {name: weight.clone() for name, weight in self._weights.items()}
        self._copy(self._average)
        try:
            yield
        finally:
            self._copy(weights)

    def state(self) -> dict[str, Tensor]:
        """Return the averages under `ema.NAME`, and the number of steps under `ema_steps`."""
        return {f"ema.{name}": value for name, value in self._average.items()} | {
            "ema_steps": torch.tensor(self.steps)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        self.steps = int(tensors["ema_steps"])
        for name, value in self._average.items():
            value.copy_(tensors[f"ema.{name}"])

    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])


def layout_with_averages(
    layout: Callable[[str], Tensor | None],
) -> Callable[[str], Tensor | None]:
    """Return a function from a name in a checkpoint to this rank's tensor like it, or None.

    A moving average is laid out as the weight that it averages.

    Args: layout: the same for the names of weights and of the optimizer's state.
    """
    return lambda name: layout(
        "model." + name.removeprefix("ema.") if name.startswith("ema.") else name
    )
