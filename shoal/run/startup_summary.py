"""The lines that are printed before the first step.

They show the global batch, the launcher, and each thing by which the numbers of this run will
differ from those of one device.

They go to `logging.getLogger("shoal")`: notes are warnings, all other lines are information. Until
a script gives the logger a handler or a level of its own, every line is printed to stdout.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.data.sharded_loader import ShardedLoader
from shoal.strategies.base import Strategy
from shoal.strategies.transforms.global_draws import DrawGlobally
from shoal.strategies.transforms.sync_batchnorm import SyncBatchNorm, batchnorms
from shoal.strategies.wrap_units import has_dropout


def lines(
    model: nn.Module,
    loader: ShardedLoader | None,
    mesh: Mesh,
    accumulate: int,
    strategies: Sequence[Strategy],
) -> list[str]:
    """Return all lines of the startup summary."""
    size = None if loader is None else loader.batch_size
    summary = [] if size is None else [_describe_batch(size, mesh, accumulate)]
    if mesh.place.launcher not in ("single", "shoal"):
        summary.append(mesh.place.describe())
    if mesh.place.local_world < mesh.place.world:
        summary.append("between hosts, what ranks send in collectives is not encrypted")
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if mesh.place.launcher == "single" and tasks != "1":
        summary.append(
            f"note: this Slurm job has {tasks} tasks, and one process trains alone: start it by "
            "srun, as in `srun python train.py`"
        )
    # Shoal's own backend runs on CPUs, and torch uses one GPU for each rank or none.
    if torch.cuda.is_available() and mesh.device.type == "cpu":
        ranks, gpus = mesh.place.local_world, torch.cuda.device_count()
        summary.append(f"note: {ranks} ranks on this machine and {gpus} GPUs: training on the CPU")
    notes = [note for strategy in strategies for note in strategy.deviations]
    if size is not None and size < mesh.data.size:
        notes.append(
            f"batch_size={size} is smaller than the {mesh.data.size} data ranks, so "
            f"{mesh.data.size - size} have nothing to compute. It is the global one; where each "
            "sample of the loader is a batch of its own, as with collate_fn=lambda b: b[0], "
            f"give each rank one: batch_size={mesh.data.size}, and a collate_fn that joins them."
        )
    share = size // mesh.data.size if size is not None else accumulate
    if 0 < share < accumulate:
        notes.append(
            f"accumulate={accumulate}: a rank has {share} samples, so {accumulate - share} of its "
            f"micro-batches are empty; accumulate={share} is as good"
        )
    return summary + [
        f"note: {note}"
        for note in [*differences(model, mesh.data.size, accumulate, strategies), *notes]
    ]


def spell_batch(batch_size: int, ranks: int, accumulate: int, of: str = "") -> str:
    """Return, for example, `global batch 256 = 8 ranks x 16 x 2 accumulated`.

    Shares that differ by one sample are given as a range.

    Args: of: stands before "ranks", as in "2 data ranks".
    """
    low, high = batch_size // ranks // accumulate, -(-batch_size // ranks // accumulate)
    share = str(low) if low == high else f"{low} to {high}"
    if accumulate > 1:
        share += f" x {accumulate} accumulated"
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


def differences(
    model: nn.Module, ranks: int, accumulate: int, strategies: Sequence[Strategy]
) -> list[str]:
    """Return a line for each thing in `model` that makes a run differ from one device."""
    if ranks * accumulate == 1:
        return []
    syncs = ranks > 1 and any(isinstance(strategy, SyncBatchNorm) for strategy in strategies)
    draws_globally = any(isinstance(strategy, DrawGlobally) for strategy in strategies)
    notes = []
    norms = list(batchnorms(model))
    if norms and not (syncs and accumulate == 1):
        over, cure = "what one rank computes at once", "GroupNorm has no such difference"
        if syncs:  # the statistics are those of all ranks
            over = "one micro-batch of all ranks at a time"
            cure = "accumulate=1 and GroupNorm have no such difference"
        elif ranks > 1:
            cure += ", sync_batchnorm=True none between ranks"
        notes.append(
            f"BatchNorm ({norms[0]} and {len(norms) - 1} more) normalises over {over}, so "
            f"gradients differ from one device by design; {cure}."
        )
    # What else draws is seen in the first step: see `first_step_notes.py`.
    dropping = [name for name, module in model.named_modules() if has_dropout(module)]
    if dropping and not draws_globally:
        notes.append(
            f"dropout ({dropping[0]}, ...) draws a stream of its own on every rank: same "
            'distribution, other masks; draws="global" draws those of one device.'
        )
    return notes


LOGGER = logging.getLogger("shoal")


class Stdout(logging.Handler):
    """Prints each line to what is `sys.stdout` at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record))


def log_line(line: str) -> None:
    """Log a line of the startup summary, or a note."""
    if not LOGGER.handlers:
        LOGGER.addHandler(Stdout())
        LOGGER.propagate = False
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    LOGGER.log(logging.WARNING if line.startswith("note: ") else logging.INFO, line)
