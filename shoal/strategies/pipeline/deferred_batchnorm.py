"""BatchNorm's running statistics as one device has them: of the whole batch, not of each
micro-batch.

      micro-batch   0        1        2        3
      normalised by its own mean and variance, each
      counted       number, mean and squared deviations are merged ──> one update of the running statistics

A module that is called twice in a forward pass has two updates, in the order of its calls.

The idea is torchgpipe's (Kim et al., arXiv:2004.09910, section 3.3). Gradients differ from one
device all the same. Merged as by Chan, Golub and LeVeque (Technical Report STAN-CS-79-773): a
difference of large squares would be noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.norm import to_local
from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.module_state import BatchNormBase


class _Call(NamedTuple):
    """One of the calls of a module in a forward pass; in their order."""

    norm: int
    stage: int
    turn: int


class _Statistics(NamedTuple):
    """Of one call in some micro-batches."""

    number: int
    mean: Tensor  # float64, one entry for each channel, as are the next
    squares: Tensor  # of deviations from the mean, summed


class DeferredBatchNorm:
    """Watches the BatchNorms of one rank's stages.

    Args: modules: among which they are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = {
            id(m): m for m in modules if isinstance(m, BatchNormBase) and m.track_running_stats
        }
        self._norms = list(found.values())
        self._seen: dict[_Call, _Statistics] = {}
        self._calls: dict[int, int] = {}
        self._stage = 0

    @contextmanager
    def counting(self, rows: int, stage: int = 0) -> Iterator[None]:
        """The time of a micro-batch's forward pass through a stage; running statistics stay
        what they are.
        """
        self._calls, self._stage = {}, stage
        norms = [norm for norm in self._norms if norm.training]
        kept = [(norm, norm.momentum, _count(norm).clone()) for norm in norms]
        # Looked at now only: not while a forward pass is computed again, nor for a stand-in.
        watched = [norm.register_forward_pre_hook(self._on_forward) for norm in norms if rows]
        for norm in norms:
            norm.momentum = 0.0  # nothing of this micro-batch alone
        try:
            yield
        finally:
            for norm, momentum, count in kept:
                norm.momentum = momentum
                _count(norm).copy_(count)
            for hook in watched:
                hook.remove()

    def _on_forward(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        with torch.no_grad():
            x = inputs[0]
            dims = [dim for dim in range(x.dim()) if dim != 1]
            wide = x.to(accumulation_dtype(x.dtype))
            variance, mean = torch.var_mean(wide, dims, correction=0)
            number = x.numel() // x.shape[1]
            seen = _Statistics(number, mean.double(), variance.double() * number)
        call = _Call(id(norm), self._stage, self._calls.get(id(norm), 0))
        self._calls[id(norm)] = call.turn + 1
        self._seen[call] = _merged(self._seen[call], seen) if call in self._seen else seen

    def commit(self) -> None:
        """One update of all running statistics for each call, as after one batch."""
        norms = {id(norm): norm for norm in self._norms}
        for call in sorted(self._seen):
            norm, (number, mean, squares) = norms[call.norm], self._seen[call]
            variance = squares / max(number - 1, 1)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            _count(norm).add_(1)
            share = 1.0 / float(_count(norm)) if norm.momentum is None else norm.momentum
            # This rank's channels, where a norm is in slices.
            to_local(norm.running_mean).lerp_(mean.to(norm.running_mean.dtype), share)
            to_local(norm.running_var).lerp_(variance.to(norm.running_var.dtype), share)
        self._seen.clear()


def _merged(one: _Statistics, other: _Statistics) -> _Statistics:
    number, apart = one.number + other.number, other.mean - one.mean
    mean = one.mean + apart * (other.number / number)
    squares = one.squares + other.squares + apart.square() * (one.number * other.number / number)
    return _Statistics(number, mean, squares)


def _count(norm: BatchNormBase) -> Tensor:
    assert norm.num_batches_tracked is not None
    return norm.num_batches_tracked
