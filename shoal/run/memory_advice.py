"""A sentence for the error of a GPU without memory: the settings of this very run that save some.

CUDA out of memory. Tried to allocate 2.00 GiB ...
In this step each rank computed 32 samples in parts of 32. What saves memory, the cheapest
first: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from shoal.comm.mesh import Mesh
from shoal.strategies.base import LocalBatch, Strategy
from shoal.strategies.options import (
    DdpOptions,
    RecomputeOptions,
    StrategyOptions,
    ZeroOptions,
)
from shoal.strategies.server_options import ServerOptions
from shoal.strategies.transforms.precision import Precision

Kind = TypeVar("Kind", bound=StrategyOptions)


class MemoryAdvice:
    """Names settings that lower the memory of a step, for the strategies of one run.

    Args:
        strategies: those of the run.
        accumulate: micro-batches of each rank's share of a batch.
    """

    def __init__(self, strategies: Sequence[Strategy], accumulate: int, mesh: Mesh) -> None:
        self._strategies = strategies
        self._accumulate = accumulate
        self._mesh = mesh

    def explain(self, error: torch.OutOfMemoryError, batch: LocalBatch) -> None:
        """Add the advice to torch's error about memory in a step of `batch`.

        The error keeps its class, so that a script which catches it still does.
        """
        error.args = (f"{error}\n{self.text(batch.num_samples)}",)

    def text(self, samples: int) -> str:
        """Return the advice for a step of `samples` samples on this rank."""
        part = -(-samples // self._accumulate)
        each = "1 sample" if samples == 1 else f"{samples} samples"
        cures = "; ".join(self._cures(part)) or "a smaller batch or model, or more GPUs"
        return (
            f"In this step this rank computed {each} in parts of {part}. What saves memory, the "
            f"cheapest first: {cures}."
        )

    def _cures(self, part: int) -> Iterator[str]:
        precision = self._find(Precision)
        if precision is None or precision.name in ("fp32", "fp64"):
            name = "fp32" if precision is None else precision.name
            yield f"precision='bf16' in the place of {name}, for activations of half the size"
        if part > 1:
            twice = 2 * self._accumulate
            yield f"accumulate={twice}, for parts of {-(-part // 2)}; the numbers stay the same"
        if self._find(RecomputeOptions) is None:
            yield "recompute in front of the strategy, which keeps no activations inside of blocks"
        yield from self._shards()

    def _shards(self) -> Iterator[str]:
        """Yield what lowers the memory of parameters, gradients and optimizer states."""
        zero = self._find(ZeroOptions)
        ranks = self._mesh.data.size
        if zero is not None:
            stage = getattr(zero, "stage", 3)
            if stage < 3 and ranks > 1:
                yield f"zero3 in the place of zero{stage}, which holds the weights of a block only"
            if not zero.offload and not self._mesh.pipeline.size > 1:
                yield f"zero{max(stage, 2)},offload=true, which keeps the states on the CPU"
        elif self._find(ServerOptions) is None and ranks == 1:
            yield "zero2,offload=true, which keeps gradients and optimizer states on the CPU"
        elif self._find(DdpOptions) is not None:
            yield f"zero2 or zero3 in the place of ddp, with a share of 1/{ranks} on each rank"

    def _find(self, kind: type[Kind]) -> Kind | None:
        """Return the strategy of this kind, if there is one."""
        return next((one for one in self._strategies if isinstance(one, kind)), None)
