"""Exact evaluation at any number of ranks: every sample once, the same sums to the last bit.

      batch     0   1   2   3   4   5   6       fixed batches of the data set in its own order;
      rank      0   1   2   0   1   2   0       ranks take them in turn, without padding

The sums of a batch depend on that batch alone. All per-batch sums are collected in one table, and
every rank adds up the table in the same order. So the result does not depend on which rank has
computed which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.comm.axis import Axis
from shoal.data.evaluation_batches import EvaluationBatches
from shoal.strategies.base import LocalModel

Measures = Callable[[Any, Any], dict[str, Tensor]]
"""(output, target) -> name -> scalar sum over the batch; `samples` is added if it is missing."""


def evaluate(
    data: Axis,
    measure: Measures,
    model: nn.Module,
    loader: DataLoader,
    to_device: Callable[[Any], Any],
) -> dict[str, float]:
    """Sum a measure over every sample of a data set, with a model that is full on every rank.

    Collective over `data`. Rank 0's buffers are broadcast first. The model is in evaluation mode
    meanwhile. Sums are float64.

    Returns: name -> sum over all samples.
    Raises:
        UsageError: the loader gives no batches.
    """
    batches = EvaluationBatches(loader, data.rank, data.size)
    data.broadcast_buffers(model)
    return _evaluate_batches(data, measure, model, to_device, batches)


def evaluate_local_model(
    data: Axis,
    measure: Measures,
    model: nn.Module,
    loader: DataLoader,
    to_device: Callable[[Any], Any],
    local_model: LocalModel,
) -> dict[str, float]:
    """Sum a measure as `evaluate` does, with a model of which each rank may hold a piece.

    Args:
        model: the prepared model or a wrapper of it. A wrapper's own buffers are left alone.
    """
    try:
        data.broadcast_buffers(local_model.module)
        # Some ranks have one batch less. Where a forward pass is collective they join the last one
        # all the same, with a batch that is not counted.
        joins = local_model.collective_forward
        batches = EvaluationBatches(loader, data.rank, data.size, joins)
        return _evaluate_batches(data, measure, model, to_device, batches)
    finally:
        local_model.reshard()


def _evaluate_batches(
    data: Axis,
    measure: Measures,
    model: nn.Module,
    to_device: Callable[[Any], Any],
    batches: EvaluationBatches,
) -> dict[str, float]:
    """Compute this rank's batches. Return the sums over all ranks."""
    rows: list[dict[str, Tensor]] = []
    with torch.no_grad(), _evaluation_mode(model):
        for item in batches:
            *inputs, target = to_device(item.batch)
            count = torch.tensor(float(item.rows))
            row = {"samples": count, **measure(model(*inputs), target)}
            rows += [row] if item.is_counted else []
    return _sum_table(data, rows, batches.total)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and every module back into the mode that it was in.

    `model.train()` afterwards would not do: a user may keep some BatchNorm layers frozen.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _sum_table(data: Axis, rows: list[dict[str, Tensor]], batches: int) -> dict[str, float]:
    """Return the sums over all batches, added in the order of batches. Collective.

    Args:
        rows: the measures of this rank's batches.
        batches: number of batches of all ranks.
    """
    # Rank 0 always has a batch. Other ranks may have none, and then do not know the names.
    names = data.broadcast_str("\n".join(rows[0]) if rows else "").split("\n")
    table = torch.zeros(batches, len(names), dtype=torch.float64, device=data.device)
    for index, row in enumerate(rows):
        table[data.rank + index * data.size] = torch.stack(
            [v.detach().double().to(data.device) for v in row.values()]
        )
    # Each entry is one rank's value plus zeros, so the sum over ranks is exact.
    return dict(zip(names, data.all_reduce(table).cpu().sum(dim=0).tolist(), strict=True))
