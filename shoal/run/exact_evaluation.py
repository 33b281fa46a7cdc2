"""Exact evaluation at any number of ranks: every sample once, the same sums to the last bit.

      batch     0   1   2   3   4   5   6       fixed batches of the data set in its own order;
      rank      0   1   2   0   1   2   0       ranks take them in turn, without padding

What is summed for a batch depends on that batch alone. The per-batch sums of all ranks meet in one
table, and every rank adds the table up in the same order, so the result does not depend on who
computed what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.comm.axis import Axis
from shoal.data.batch_shards import BatchShard, shard_batch
from shoal.data.loader import fetched
from shoal.errors import UsageError

Measures = Callable[[Any, Any], dict[str, Tensor]]
"""(output, target) -> name -> scalar sum over the batch; `samples` is added when it is not
there.
"""


def evaluate(
    data: Axis,
    measure: Measures,
    model: nn.Module,
    loader: DataLoader,
    move: Callable[[Any], Any],
    all_forward: bool = False,
    equal_buffers: bool = True,
) -> dict[str, float]:
    """Sum what `measure` gives over every sample of `loader`'s data set. Collective.

    The model is put into evaluation mode and back. Buffers are rank 0's on all ranks. Sums are
    float64.

    Args: all_forward: the model's forward pass is collective; a rank whose turn never comes
        computes without counting. equal_buffers: make them so; they are where the caller has.

    Returns: name -> sum over all samples.
    Raises: UsageError: the loader has no batch size, or its data set is empty.
    """
    batches = list(_batches(loader))
    mine = batches[data.rank :: data.size]
    idle = all_forward and data.rank >= len(batches) % data.size > 0
    if equal_buffers:
        data.broadcast_buffers(model)
    rows: list[dict[str, Tensor]] = []
    with torch.no_grad(), _evaluating(model):
        coming = mine + batches[:1] * idle
        for share, batch in zip(coming, fetched(loader, coming), strict=True):
            *inputs, target = move(batch)
            rows.append(
                {"samples": torch.tensor(float(share.rows)), **measure(model(*inputs), target)}
            )
    return _total(data, rows[: len(mine)], len(batches))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is as it was, frozen BatchNorm too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _total(data: Axis, rows: list[dict[str, Tensor]], batches: int) -> dict[str, float]:
    """Add up the table of all batches, in order."""
    # Rank 0 always has a batch; others may have none and so not know what is measured.
    names = data.broadcast_str("\n".join(rows[0]) if rows else "").split("\n")
    table = torch.zeros(batches, len(names), dtype=torch.float64, device=data.device)
    for index, row in enumerate(rows):
        table[data.rank + index * data.size] = torch.stack(
            [v.detach().double().to(data.device) for v in row.values()]
        )
    # Every entry is one number plus zeros: the sum over ranks is exact.
    return dict(zip(names, data.all_reduce(table).cpu().sum(dim=0).tolist(), strict=True))


def _batches(loader: DataLoader) -> Iterator[BatchShard]:
    """The data set in its own order, cut into fixed batches."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise UsageError(
            "evaluation needs a plain DataLoader(dataset, batch_size=...): its batches are what "
            "ranks take in turn."
        )
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if samples == 0:
        raise UsageError("there is nothing to evaluate: the data set is empty.")
    return shard_batch(range(samples), 0, 0, loader.batch_size, drop_last=False, rank=0, ranks=1)
