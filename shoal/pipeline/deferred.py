"""BatchNorm's running statistics as one device has them: of the whole batch, not of each micro-batch.

      micro-batch   0        1        2        3
      normalised by its own mean and variance, each
      counted       sum, sum of squares and number of entries add up ──> one update of the running statistics

The idea is torchgpipe's (Kim et al., arXiv:2004.09910, section 3.3). Gradients differ from one device all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.norm import local


class DeferredStatistics:
    """Watches the BatchNorms of one rank's stages.

    Args: modules: among which they are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = {id(m): m for m in modules if isinstance(m, _BatchNorm) and m.track_running_stats}
        self._norms = list(found.values())
        self._sums: dict[int, list[Tensor]] = {}

    @contextmanager
    def counting(self, rows: int) -> Iterator[None]:
        """The time of a forward pass through a micro-batch; running statistics stay what they are."""
        norms = [norm for norm in self._norms if norm.training]
        kept = [(norm, norm.momentum, _count(norm).clone()) for norm in norms]
        # Looked at now only: not while a forward pass is computed again, nor for a stand-in.
        watched = [norm.register_forward_pre_hook(self._look) for norm in norms if rows]
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

    def _look(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        with torch.no_grad():
            x = inputs[0]
            dims = [dim for dim in range(x.dim()) if dim != 1]
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            number = torch.tensor(float(x.numel() // x.shape[1]), device=x.device, dtype=wide.dtype)
            seen = [number, wide.sum(dims), wide.square().sum(dims)]
        known = self._sums.get(id(norm))
        self._sums[id(norm)] = seen if known is None else [a + b for a, b in zip(known, seen, strict=True)]

    def commit(self) -> None:
        """One update of all running statistics, as after one batch."""
        for norm in self._norms:
            sums = self._sums.pop(id(norm), None)
            if sums is None:
                continue
            number, total, squares = sums
            mean = total / number
            variance = (squares / number - mean.square()) * number / (number - 1).clamp(min=1)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            _count(norm).add_(1)
            share = 1.0 / float(_count(norm)) if norm.momentum is None else norm.momentum
            # This rank's channels, where a norm is in slices.
            local(norm.running_mean).lerp_(mean.to(norm.running_mean.dtype), share)
            local(norm.running_var).lerp_(variance.to(norm.running_var.dtype), share)


def _count(norm: _BatchNorm) -> Tensor:
    assert norm.num_batches_tracked is not None
    return norm.num_batches_tracked
