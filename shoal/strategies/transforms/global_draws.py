"""The option `draws="global"`: passes draw the random numbers of one device.

      loop       x, y ── forward_backward ── step ── x, y ── forward_backward
      stream     of this data rank │ global │ of this data rank │ global

There are two streams of random numbers. Inside of `forward_backward` all ranks draw from one, which
is equal everywhere, for the whole global batch (`shoal/data/draws.py`). Outside of it each data
rank draws from a stream of its own, for nobody knows there which rows a tensor belongs to.

Each micro-batch begins with the same state of the global stream and keeps other rows of it. So do
the generators of Python and NumPy, whose numbers count for the whole batch: they are equal on all
ranks anyway, and go on from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh
from shoal.data.draws import GlobalDraws, Rows, digest_of_generators
from shoal.data.seeds import HostGenerators, derive_seed, preserve_rng_state
from shoal.errors import StrategyRefused, UsageError
from shoal.strategies.base import (
    Forward,
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
    Strategy,
)
from shoal.strategies.state import StrategyState

STATE = "global_draws.state"
"""Name of the state of the global stream in a checkpoint."""


class DrawGlobally(Strategy):
    """Passes draw random numbers for the global batch. It applies after all other strategies.

    Args: seed: of the run.
    """

    can_apply_again: ClassVar[bool] = True

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._stream: GlobalStream | None = None

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `run`, `forward` and `strategy_state`.

        Raises: StrategyRefused: ranks do not draw one after the other as one device does.
        """
        if model.is_partial:
            raise StrategyRefused(
                'draws="global": the stages of a pipeline draw at the same time, and one device '
                'draws for one layer after the other. Use draws="rank", or no pipeline.'
            )
        if not model.strategy_state.is_synchronous:
            raise StrategyRefused(
                'draws="global" needs ranks that take each step together; with this strategy they '
                'do not. Use draws="rank".'
            )
        # Applied again, it goes on where it was.
        stream = self._stream or GlobalStream(mesh.data, derive_seed(self.seed, 0))
        self._stream = stream

        def forward(batch: LocalBatch) -> ForwardOutput:
            stream.begin_microbatch(batch)
            return model.forward(batch)

        def run(outer: Forward, batch: LocalBatch) -> StepResult:
            with stream.step():
                return model.run(outer, batch)

        state = cast("StrategyState", StateWithStream(model.strategy_state, stream))
        return replace(model, forward=forward, run=run, strategy_state=state)


class GlobalStream:
    """The stream from which all ranks draw inside of `forward_backward`.

    Attributes: state: of the generators at the beginning of a step; uint8.
    """

    def __init__(self, axis: Axis, seed: int) -> None:
        self.axis = axis
        self._draws = GlobalDraws(Rows(0, 1, 1))
        self._others = HostGenerators.now()
        with preserve_rng_state([axis.device], beyond_torch=False):
            torch.manual_seed(seed)
            self.state = self._generator_states()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Draw from the global stream in the passes of one step. Collective.

        Raises: UsageError: ranks have drawn different numbers.
        """
        self._others = HostGenerators.now()
        with preserve_rng_state([self.axis.device], beyond_torch=False):
            with self._draws:
                yield
            self._check_equal()
            self.state = self._generator_states()

    def begin_microbatch(self, batch: LocalBatch) -> None:
        """Draw for the rows of this micro-batch, from the beginning of the step on."""
        if not batch.step.sizes_known:
            raise UsageError(
                'draws="global" must know which rows of the global batch this rank computes. Give '
                'forward_backward what a prepared loader yields, or use draws="rank".'
            )
        total = batch.step.global_batch_size
        first, count = (batch.first_row, batch.num_samples) if batch.num_samples else (0, 1)
        self._draws.begin(Rows(first, count, total))
        self._load(self.state)
        self._others.restore()

    def _check_equal(self) -> None:
        """Raise UsageError, on all ranks, if their generators differ. Collective."""
        digest = digest_of_generators(self.axis.device, self._draws.digest)
        if not self.axis.is_same(digest):
            raise UsageError(
                'draws="global": ranks have drawn tensors of different shapes for one step. A '
                "tensor without samples may have had the size of a rank's share, or code draws on "
                'some ranks only. Draw one row for each sample, or use draws="rank".'
            )

    def _generator_states(self) -> tuple[Tensor, ...]:
        device = self.axis.device
        cpu = torch.get_rng_state()
        return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)

    def _load(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.axis.device)


class StateWithStream:
    """The state of another strategy, and that of the global stream."""

    def __init__(self, inner: StrategyState, stream: GlobalStream) -> None:
        self._inner = inner
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Return all else as the other strategy has it."""
        return getattr(self._inner, name)

    def state_dict(self) -> dict[str, Tensor]:
        states = {f"{STATE}{index}": state for index, state in enumerate(self._stream.state)}
        return self._inner.state_dict() | states

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        names = [f"{STATE}{index}" for index in range(len(self._stream.state))]
        lost = self._inner.load_state_dict(state, private)
        if all(name in state for name in names):
            self._stream.state = tuple(state[name].cpu() for name in names)
            return lost
        return [*lost, 'draws="global" begins its random numbers anew: the checkpoint has none']
