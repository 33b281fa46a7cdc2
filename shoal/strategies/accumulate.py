"""Gradient accumulation: a rank's share of a batch in several parts, one after the other.

      share   [ rows 0..7 | rows 8..15 | rows 16..23 ]
                 fwd bwd     fwd bwd      fwd bwd ──> reduce         gradients add up; only the last part communicates

Memory for activations shrinks by the number of parts; the gradients are those of the whole share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.data.nest import nested
from shoal.errors import UsageError
from shoal.strategies.base import Batch, Forward, Loss, Part


@dataclass(frozen=True)
class Accumulate:
    """Args: parts: micro-batches that a share is split in; a share of fewer samples has as many parts as samples."""

    parts: int

    def cut(self, part: Part, mesh: Mesh) -> Part:
        """Replaces run."""

        def run(forward: Forward, batch: Batch) -> Loss:
            loss = None
            # Where a forward pass is collective, a rank with fewer samples makes as many of them as the others.
            least = -(-batch.global_rows // mesh.data.size) if part.all_forward else 1
            for micro in split(batch, self.parts, least):
                loss = part.run(forward, micro._replace(before=None if loss is None else loss.totals))
            assert loss is not None
            return loss

        return part if self.parts == 1 else replace(part, run=run)


def split(batch: Batch, parts: int, least: int = 1) -> Iterator[Batch]:
    """Micro-batches of nearly equal size along dimension 0 of every tensor; the stop request goes with the last.

    There are `parts` of them, or as many as samples, but `least` all the same: stand-ins fill up.
    """
    parts = min(parts, max(batch.rows, least))
    base, extra = divmod(batch.rows, parts)
    start = 0
    for index in range(parts):
        rows = base + (index < extra)
        window = slice(start, start + rows) if rows else slice(0, 1)
        last = index == parts - 1
        yield batch._replace(
            inputs=cut_rows(batch.inputs, window, batch.rows),
            target=cut_rows(batch.target, window, batch.rows),
            rows=rows,
            last=last,
            stop=batch.stop and last,
        )
        start += rows


def cut_rows(value: Any, window: slice, rows: int) -> Any:
    """The same rows of every tensor in a nest of tuples, lists and dicts; 0-dimensional tensors stay whole."""
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] != max(rows, 1):
            raise UsageError(
                f"accumulate splits batches along dimension 0; this rank has {rows} samples and a tensor of shape "
                f"{tuple(value.shape)}. Put the batch dimension first, or use accumulate=1."
            )
        return value[window] if value.dim() else value
    return nested(value, lambda item: cut_rows(item, window, rows))
