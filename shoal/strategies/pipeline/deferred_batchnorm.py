"""Deferred BatchNorm: running statistics of the whole batch, not of single micro-batches.

      micro-batch    0         1         2         3
      normalised     by its own mean and variance
      statistics     count, mean and squared deviations are merged ──> one update for the batch

A module that is called twice in a forward pass gets two updates, in the order of its calls.

Running statistics become those of one device. Gradients still differ from one device, since each
micro-batch is normalised alone.

Sources: torchgpipe (Kim et al., arXiv:2004.09910, section 3.3) for the idea; Chan, Golub and
LeVeque (Technical Report STAN-CS-79-773) for the merge. The difference of two large sums of squares
would lose all digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.norm import to_local
from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.module_state import BatchNormBase


class _CallKey(NamedTuple):
    """One call of a module in a forward pass. Keys sort in the order of calls."""

    norm_id: int
    stage: int
    call_index: int  # within the stage


class _Moments(NamedTuple):
    """Statistics of one call over some micro-batches; tensors are float64, (channels,)."""

    num_values: int
    mean: Tensor
    squares: Tensor  # sum of squared deviations from the mean


class DeferredBatchNorm:
    """The BatchNorm modules of one rank's stages.

    Args:
        modules: the BatchNorms among them are used.
        reported: ids of modules whose calls `on_call` is told; the others get hooks. Hooks of a
            unit would see absent values.
    """

    def __init__(self, modules: Iterable[nn.Module], reported: Set[int] = frozenset()) -> None:
        norms = {
            id(m): m for m in modules if isinstance(m, BatchNormBase) and m.track_running_stats
        }
        self._norms = list(norms.values())
        self._reported = reported
        self._counting: set[int] = set()  # ids of the norms whose calls count now
        self._moments: dict[_CallKey, _Moments] = {}
        self._num_calls: dict[int, int] = {}
        self._stage = 0

    @contextmanager
    def counting(self, num_samples: int, stage: int = 0) -> Iterator[None]:
        """Collect statistics during a micro-batch's forward pass; running statistics stay as they
        are.

        Args: num_samples: 0 for a stand-in, which is not counted.
        """
        self._num_calls = {}
        self._stage = stage
        norms = [norm for norm in self._norms if norm.training]
        saved = [(norm, norm.momentum, _batch_counter(norm).clone()) for norm in norms]
        # Hooks exist only during this pass, so a recomputation in the backward pass is not counted.
        hooked = norms if num_samples else []
        self._counting = {id(norm) for norm in hooked}
        hooks = [
            norm.register_forward_pre_hook(self.on_call)
            for norm in hooked
            if id(norm) not in self._reported
        ]
        for norm in norms:
            norm.momentum = 0.0  # the module's own update changes nothing
        try:
            yield
        finally:
            self._counting = set()
            for norm, momentum, counter in saved:
                norm.momentum = momentum
                _batch_counter(norm).copy_(counter)
            for hook in hooks:
                hook.remove()

    def on_call(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the statistics of one call, if the module counts now."""
        if id(norm) not in self._counting:
            return
        with torch.no_grad():
            x = inputs[0]
            dims = [dim for dim in range(x.dim()) if dim != 1]
            wide = x.to(accumulation_dtype(x.dtype))
            variance, mean = torch.var_mean(wide, dims, correction=0)
            count = x.numel() // x.shape[1]
            moments = _Moments(count, mean.double(), variance.double() * count)
        key = _CallKey(id(norm), self._stage, self._num_calls.get(id(norm), 0))
        self._num_calls[id(norm)] = key.call_index + 1
        if key in self._moments:
            moments = _merged(self._moments[key], moments)
        self._moments[key] = moments

    def commit(self) -> None:
        """Update all running statistics, once for each call, as after one batch."""
        norms = {id(norm): norm for norm in self._norms}
        for key in sorted(self._moments):
            norm = norms[key.norm_id]
            count, mean, squares = self._moments[key]
            variance = squares / max(count - 1, 1)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            _batch_counter(norm).add_(1)
            # As in torch: without a momentum, the average over all batches.
            weight = 1.0 / float(_batch_counter(norm)) if norm.momentum is None else norm.momentum
            # Local: tensor parallelism may have divided the channels.
            to_local(norm.running_mean).lerp_(mean.to(norm.running_mean.dtype), weight)
            to_local(norm.running_var).lerp_(variance.to(norm.running_var.dtype), weight)
        self._moments.clear()


def _merged(one: _Moments, other: _Moments) -> _Moments:
    """Return the moments of the union of two sets of values."""
    count = one.num_values + other.num_values
    delta = other.mean - one.mean
    mean = one.mean + delta * (other.num_values / count)
    squares = (
        one.squares + other.squares + delta.square() * (one.num_values * other.num_values / count)
    )
    return _Moments(count, mean, squares)


def _batch_counter(norm: BatchNormBase) -> Tensor:
    assert norm.num_batches_tracked is not None
    return norm.num_batches_tracked
