"""What is said before the first step: the global batch, and where the numbers will differ from
one device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.data.loader import DistributedBatchLoader
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.strategies.base import Strategy
from shoal.strategies.wrap_units import has_dropout


def lines(
    model: nn.Module,
    loader: DistributedBatchLoader | None,
    mesh: Mesh,
    accumulate: int,
    strategies: Iterable[Strategy],
) -> list[str]:
    """All of it: the global batch, who launched this, and notes on what is not as one might
    think.
    """
    said = [] if loader is None else [_spell(loader.batch_size, mesh, accumulate)]
    if mesh.place.launcher not in ("single", "shoal"):
        said.append(mesh.place.describe())
    if torch.cuda.is_available() and mesh.device.type == "cpu":
        ranks, gpus = mesh.place.local_world, torch.cuda.device_count()
        said.append(f"note: {ranks} ranks on this machine and {gpus} GPUs: training on the CPU")
    notes = [note for strategy in strategies for note in strategy.deviations]
    return said + [
        f"note: {note}" for note in [*differences(model, mesh.data.size, accumulate), *notes]
    ]


def spell_batch(batch_size: int, ranks: int, accumulate: int, of: str = "") -> str:
    """`global batch 256 = 8 ranks x 16 x 2 accumulated`; shares that differ by one sample are
    given as a range.
    """
    share = _range_text(batch_size, ranks)
    if accumulate > 1:
        low, high = batch_size // ranks, -(-batch_size // ranks)
        share = f"{_range_text(low, accumulate, high)} x {accumulate} accumulated"
    return f"global batch {batch_size} = {ranks} {of}{'rank' if ranks == 1 else 'ranks'} x {share}"


def _spell(batch_size: int, mesh: Mesh, accumulate: int) -> str:
    """Where fewer ranks than all share out the batch: `... = 2 data ranks x 8; 8 ranks = 2 data
    x 4 tensor`.
    """
    if mesh.axes is None:
        return spell_batch(batch_size, mesh.size, accumulate)
    sizes = [
        f"{axis.size} {name}"
        for name, axis in mesh.axes._asdict().items()
        if axis.size > 1 or name == "data"
    ]
    spelled = spell_batch(batch_size, mesh.data.size, accumulate, of="data ")
    return f"{spelled}; {mesh.size} ranks = {' x '.join(sizes)}"


def _range_text(total: int, parts: int, high: int | None = None) -> str:
    low, top = total // parts, -(-(high or total) // parts)
    return str(low) if low == top else f"{low} to {top}"


def differences(model: nn.Module, ranks: int, accumulate: int) -> list[str]:
    """One line for each thing in `model` that makes this run differ from one device, whatever
    the strategy.
    """
    notes = []
    plain = [
        name
        for name, m in model.named_modules()
        if isinstance(m, BatchNormBase) and not _synchronised(m)
    ]
    if plain and ranks * accumulate > 1:
        notes.append(
            f"BatchNorm ({plain[0]} and {len(plain) - 1} more) normalises over what one rank "
            "computes at once, so "
            "gradients differ from one device by design; GroupNorm has no such difference, "
            "SyncBatchNorm (CUDA) none "
            "between ranks."
        )
    dropping = [name for name, m in model.named_modules() if has_dropout(m)]
    if dropping and ranks * accumulate > 1:
        notes.append(
            f"dropout ({dropping[0]}, ...) draws a stream of its own on every rank: same law, "
            "other masks."
        )
    return notes


def _synchronised(module: nn.Module) -> bool:
    return isinstance(module, nn.SyncBatchNorm)
