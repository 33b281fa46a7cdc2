"""Gradient accumulation: a rank's share of a batch in several parts, one after the other.

      share   [ rows 0..7 | rows 8..15 | rows 16..23 ]
                 fwd bwd     fwd bwd      fwd bwd ──> reduce         gradients add up; only the last part communicates

Memory for activations shrinks by the number of parts; the gradients are those of the whole share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.comm.mesh import Mesh
from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult, Strategy
from shoal.strategies.microbatch import split_microbatches


@dataclass(frozen=True)
class Accumulate(Strategy):
    """Args: parts: micro-batches that a share is split in; a share of fewer samples has as many
    parts as samples.
    """

    parts: int

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces run."""

        def run(forward: Forward, batch: LocalBatch) -> StepResult:
            loss = None
            # Where a forward pass is collective, a rank with fewer samples makes as many of them as
            # the others.
            least = -(-batch.global_batch_size // mesh.data.size) if model.collective_forward else 1
            for micro in split_microbatches(batch, self.parts, least):
                loss = model.run(
                    forward,
                    micro._replace(previous_totals=None if loss is None else loss.step_totals),
                )
            assert loss is not None
            return loss

        return model if self.parts == 1 else replace(model, run=run)
