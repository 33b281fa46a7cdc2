"""The exponential moving average (EMA) of the weights, which is evaluated in their place.

      average <- decay * average + (1 - decay) * weights       after every step

It varies less than the weights (Polyak & Juditsky, 1992). In the first steps the decay is
(1 + steps) / (10 + steps), so that the average forgets the initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm.assembly import shard_like
from shoal.comm.mesh import Mesh
from shoal.comm.norm import full_tensor, to_local
from shoal.errors import UsageError
from shoal.platform.torch_private.kernels import foreach_lerp_

if TYPE_CHECKING:
    from shoal.run.run import Run


class Ema:
    """The moving average of the trainable weights of a run. `Run.ema` makes it.

    Every rank has the average of what it holds, whole weights or shards: equal weights give equal
    averages. Buffers are not averaged.

    Args: decay: in (0, 1); 0.999 averages over about a thousand steps.
    """

    def __init__(self, run: Run, decay: float) -> None:
        self.decay = decay
        self._run = run
        self._is_divided = False  # a strategy may wait for the first batch
        self._begin()

    def _begin(self) -> None:
        """Begin with the present weights."""
        self.steps = 0  # that were averaged
        self._divide({})

    def update(self) -> None:
        """Add the present weights to the average. Call it after each optimizer step.

        A step that was skipped, because it was not finite, leaves the average as it is.
        """
        if not self._run.finite:
            return
        self._run.wait()  # for the new weights
        if not self._is_divided:
            self._divide(self._average)
            self._is_divided = True
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        if not self._average:  # a stage of a pipeline may have no parameters
            return
        # Local tensors, because torch takes no lists that mix DTensors and plain tensors.
        average = [to_local(value) for value in self._average.values()]
        weights = [to_local(value) for value in self._weights.values()]
        foreach_lerp_(average, weights, 1 - decay)

    def _divide(self, averages: Mapping[str, Tensor]) -> None:
        """Average what this rank holds from now on, and go on from these averages, or its weights.

        Tensor and pipeline parallelism divide a model with its first batch.
        """
        self._weights = {name: value.detach() for name, value in self._run.parameters().items()}
        self._average = {
            name: shard_like(averages[name], weight) if name in averages else weight.clone()
            for name, weight in self._weights.items()
        }

    @contextmanager
    def prepared_again(self) -> Iterator[None]:
        """Keep the averages while models are prepared again, and divided anew. Collective.

        Raises: UsageError: parameters have other names afterwards.
        """
        whole = {name: full_tensor(value) for name, value in self._average.items()}
        yield
        if lost := sorted(whole.keys() - self._run.parameters().keys()):
            raise UsageError(
                f"run.prepare: there is no {lost[0]} any more, of which run.ema has an average. "
                "Prepare all models first, and call run.ema after that."
            )
        self._divide(whole)
        self._is_divided = False

    def broadcast(self, mesh: Mesh) -> None:
        """Copy rank 0's average to every rank. Collective."""
        for average in self._average.values():
            mesh.broadcast_tensor(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in the place of the weights in this context. Collective.

        `run.evaluate`, `run.predict`, `run.save` and `run.weights` then mean the averages.
        """
        self._run.synchronize()
        with self._run.edit():  # servers own the weights
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

    def load(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Load what `state` returned. Return a note if there is no average: it begins anew then."""
        if "ema_steps" not in tensors:
            self._begin()
            return ["it holds no moving average: that begins with the weights"]
        self.steps = int(tensors["ema_steps"])
        for name, value in self._average.items():
            value.copy_(tensors[f"ema.{name}"])
        return []

    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])
