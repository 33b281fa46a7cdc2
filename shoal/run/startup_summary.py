"""The lines that are printed before the first step.

They show the global batch, the launcher, and each thing by which the numbers of this run will
differ from those of one device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.data.sharded_loader import ShardedLoader
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.strategies.base import Strategy
from shoal.strategies.wrap_units import has_dropout


def lines(
    model: nn.Module,
    loader: ShardedLoader | None,
    mesh: Mesh,
    accumulate: int,
    strategies: Iterable[Strategy],
) -> list[str]:
    """Return all lines of the startup summary."""
    size = None if loader is None else loader.batch_size
    summary = [] if size is None else [_describe_batch(size, mesh, accumulate)]
    if mesh.place.launcher not in ("single", "shoal"):
        summary.append(mesh.place.describe())
    # Shoal's own backend runs on CPUs, and torch uses one GPU for each rank or none.
    if torch.cuda.is_available() and mesh.device.type == "cpu":
        ranks, gpus = mesh.place.local_world, torch.cuda.device_count()
        summary.append(f"note: {ranks} ranks on this machine and {gpus} GPUs: training on the CPU")
    notes = [note for strategy in strategies for note in strategy.deviations]
    return summary + [
        f"note: {note}" for note in [*differences(model, mesh.data.size, accumulate), *notes]
    ]


def spell_batch(batch_size: int, ranks: int, accumulate: int, of: str = "") -> str:
    """Return, for example, `global batch 256 = 8 ranks x 16 x 2 accumulated`.

    Shares that differ by one sample are given as a range.

    Args:
        of: stands before "ranks", as in "2 data ranks".
    """
    share = _range_text(batch_size, ranks)
    if accumulate > 1:
        low, high = batch_size // ranks, -(-batch_size // ranks)
        share = f"{_range_text(low, accumulate, high)} x {accumulate} accumulated"
    return f"global batch {batch_size} = {ranks} {of}{'rank' if ranks == 1 else 'ranks'} x {share}"


def _describe_batch(batch_size: int, mesh: Mesh, accumulate: int) -> str:
    """Return the global batch, and the mesh if some ranks share samples.

    Then it is `global batch 16 = 2 data ranks x 8; 8 ranks = 2 data x 4 tensor`.
    """
    if mesh.axes is None:
        return spell_batch(batch_size, mesh.size, accumulate)
    sizes = [
        f"{axis.size} {name}"
        for name, axis in mesh.axes._asdict().items()
        if axis.size > 1 or name == "data"
    ]
    batch = spell_batch(batch_size, mesh.data.size, accumulate, of="data ")
    return f"{batch}; {mesh.size} ranks = {' x '.join(sizes)}"


def _range_text(total: int, parts: int, high: int | None = None) -> str:
    """Return the least and the greatest part of `total` to `high` samples in `parts` parts."""
    low = total // parts
    top = -(-(high or total) // parts)
    return str(low) if low == top else f"{low} to {top}"


def differences(model: nn.Module, ranks: int, accumulate: int) -> list[str]:
    """Return a line for each thing in `model` that makes any strategy differ from one device."""
    notes = []
    local_norms = [
        name
        for name, m in model.named_modules()
        if isinstance(m, BatchNormBase) and not isinstance(m, nn.SyncBatchNorm)
    ]
    if local_norms and ranks * accumulate > 1:
        notes.append(
            f"BatchNorm ({local_norms[0]} and {len(local_norms) - 1} more) normalises over what "
            "one rank computes at once, so gradients differ from one device by design; GroupNorm "
            "has no such difference, SyncBatchNorm (CUDA) none between ranks."
        )
    dropping = [name for name, m in model.named_modules() if has_dropout(m)]
    if dropping and ranks * accumulate > 1:
        notes.append(
            f"dropout ({dropping[0]}, ...) draws a stream of its own on every rank: same law, "
            "other masks."
        )
    return notes
