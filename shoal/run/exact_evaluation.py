"""Exact evaluation at any number of ranks: every sample once, the same sums to the last bit.

      batch     0   1   2   3   4   5   6       fixed batches of the data set in its own order;
      rank      0   1   2   0   1   2   0       ranks take them in turn, without padding

The sums of a batch depend on that batch alone. All per-batch sums are collected in one table, and
every rank adds up the table in the same order. So the result does not depend on which rank has
computed which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.comm.axis import Axis
from shoal.data.evaluation_batches import EvaluationBatches
from shoal.errors import UsageError
from shoal.strategies.base import LocalModel
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress

ComputeSums = Callable[..., dict[str, Tensor]]
"""(*batch) -> name -> scalar sum over the batch; `samples` is added if it is missing."""


def evaluate(
    data: Axis,
    compute_sums: ComputeSums,
    loader: DataLoader,
    models: Sequence[nn.Module],
    to_device: Callable[[Any], Any],
    local_model: LocalModel | None,
) -> dict[str, float]:
    """Sum values over every sample of a data set. Collective over `data`.

    Rank 0's buffers are broadcast first. Sums are float64.

    Args:
        models: are in evaluation mode meanwhile.
        local_model: of the prepared models; None if there are none.

    Returns: name -> sum over all samples.

    Raises:
        UsageError: the loader gives no batches.
    """
    if local_model is None:
        batches = EvaluationBatches(loader, data.rank, data.size)
        for model in models:
            data.broadcast_buffers(model)
        with _evaluation_mode(models):
            return _evaluate_batches(data, compute_sums, to_device, batches)
    local_model.strategy_state.synchronize()
    try:
        data.broadcast_buffers(local_model.module)
        # Some ranks have one batch less. Where a forward pass is collective they join the last one
        # all the same, with a batch that is not counted.
        joins = local_model.pass_traits.collective_forward
        batches = EvaluationBatches(loader, data.rank, data.size, joins)
        compute = partial(local_model.outside_step.call, compute_sums)
        with _evaluation_mode(models):
            return _evaluate_batches(data, compute, to_device, batches)
    finally:
        local_model.outside_step.reshard()


def _evaluate_batches(
    data: Axis,
    compute_sums: ComputeSums,
    to_device: Callable[[Any], Any],
    batches: EvaluationBatches,
) -> dict[str, float]:
    """Compute this rank's batches. Return the sums over all ranks."""
    rows: list[dict[str, Tensor]] = []
    progress = own_progress()
    with torch.no_grad(), progress.during(Phase.EVALUATION):
        for item in batches:
            progress.enter(Phase.EVALUATION)
            count = torch.tensor(float(item.rows))
            row = {"samples": count, **_compute(compute_sums, to_device(item.batch))}
            rows += [row] if item.is_counted else []
    return _sum_table(data, rows, batches.total)


def _compute(compute_sums: ComputeSums, batch: Any) -> dict[str, Tensor]:
    """Call the user's function on a batch.

    Raises: UsageError: it returned something else than a dict of scalars.
    """
    if isinstance(batch, Mapping):
        sums = compute_sums(**batch)
    elif isinstance(batch, (tuple, list)):
        sums = compute_sums(*batch)
    else:
        sums = compute_sums(batch)
    if not isinstance(sums, Mapping):
        raise UsageError(
            f"evaluate: compute_sums returned a {type(sums).__name__}; it must return a dict of "
            'sums over its batch, such as {"correct": (scores.argmax(1) == y).sum()}.'
        )
    return {name: torch.as_tensor(value) for name, value in sums.items()}


@contextmanager
def _evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put models into evaluation mode, and every module back into the mode that it was in.

    `model.train()` afterwards would not do: a user may keep some BatchNorm layers frozen.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _sum_table(data: Axis, rows: list[dict[str, Tensor]], batches: int) -> dict[str, float]:
    """Return the sums over all batches, added in the order of batches. Collective.

    Args:
        rows: the sums of this rank's batches.
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
