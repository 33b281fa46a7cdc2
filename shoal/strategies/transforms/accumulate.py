"""Gradient accumulation: a rank computes its local batch in several micro-batches.

      local batch   │ samples 0..7 │ samples 8..15 │ samples 16..23 │
                        fwd bwd         fwd bwd          fwd bwd ──> reduce    gradients are summed;
                                                                               one communication

Memory for activations shrinks by the number of micro-batches. The gradients are those of the whole
local batch. What is drawn from the generators of Python and NumPy counts for the whole batch, such
as the choice to leave out a layer: each micro-batch begins in the same state of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.comm.mesh import Mesh
from shoal.data.seeds import HostGenerators
from shoal.strategies.base import (
    ComputedLoss,
    Extra,
    Forward,
    LocalBatch,
    LocalModel,
    StepResult,
    Strategy,
)
from shoal.strategies.local_step import split_microbatches


@dataclass(frozen=True)
class Accumulate(Strategy):
    """Gradient accumulation.

    Args: parts: micro-batches of a local batch. A batch of fewer samples has one for each sample.
    """

    can_apply_again: ClassVar[bool] = True
    parts: int

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `run`."""
        if self.parts == 1:
            return model

        def run(forward: Forward, batch: LocalBatch) -> StepResult:
            if isinstance(batch.step.compute_loss, ComputedLoss):
                return model.run(forward, batch)
            result = None
            extras: tuple[Extra, ...] = ()
            begin = HostGenerators.now()
            for microbatch in accumulated(batch, self.parts, model, mesh):
                if HostGenerators.now() != begin:
                    begin.restore()
                totals = None if result is None else result.step_totals
                result = model.run(forward, microbatch._replace(previous_totals=totals))
                extras += result.extras
            assert result is not None
            return result._replace(extras=extras)

        return replace(model, run=run)


def accumulated(
    batch: LocalBatch, parts: int, model: LocalModel, mesh: Mesh
) -> Iterator[LocalBatch]:
    """Return the micro-batches of a local batch, as `Accumulate` computes them."""
    min_count = 1
    if model.pass_traits.collective_forward:
        # All ranks must make as many forward passes as the rank with the largest local batch. This
        # is its number of samples; stand-ins fill up the others.
        min_count = -(-batch.step.global_batch_size // mesh.data.size)
        if not batch.step.sizes_known:
            min_count = parts
    return split_microbatches(batch, parts, min_count)
