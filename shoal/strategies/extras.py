"""Values beside the loss: collected from micro-batches, and given back for this rank's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.data.tree_map import tree_map
from shoal.errors import UsageError
from shoal.platform.tensors import tensor_on
from shoal.strategies.base import MAX_SUMMED, NONFINITE, SUMMED, Extra
from shoal.strategies.loss_terms import Summed


def detach(value: Any) -> Any:
    """Return a nest with its tensors detached."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map(value, detach)


def add_summed(totals: Tensor, extra: Any, weight: float) -> None:
    """Add the summed values of a nest to the totals of a step, in order.

    Args: totals: (TOTALS_LENGTH,). weight: a factor, as of all totals.

    Raises: UsageError: there are too many.
    """
    position = SUMMED
    for marked in _leaves(extra):
        if not isinstance(marked, Summed):
            continue
        values = marked.value.reshape(-1)
        if position + len(values) > NONFINITE:
            raise UsageError(
                f"compute_loss returned more than {MAX_SUMMED} summed numbers; a step carries "
                f"{MAX_SUMMED}."
            )
        totals[position : position + len(values)] += (values * weight).to(totals)
        position += len(values)


def has_own(value: Any) -> bool:
    """Return True if a nest has a tensor that is not to be summed over ranks."""
    return any(isinstance(leaf, Tensor) for leaf in _leaves(value))


def join(extras: Sequence[Extra], totals: Tensor) -> Any:
    """Return the values of all micro-batches of a step as one nest.

    Tensors with a row for each sample are concatenated; numbers and scalars are averaged over
    samples; summed values are those of all ranks.

    Args: totals: (TOTALS_LENGTH,), summed over all ranks.

    Raises: UsageError: a value of several micro-batches that cannot be joined.
    """
    numbers = iter(totals[SUMMED:NONFINITE].unbind())
    return _join([extra.num_samples for extra in extras], [e.value for e in extras], numbers)


def _join(samples: list[int], values: list[Any], numbers: Iterator[Tensor]) -> Any:
    first = values[0]
    if isinstance(first, Summed):
        taken = [next(numbers) for _ in range(first.value.numel())]
        return torch.stack(taken).reshape(first.value.shape).clone()
    if isinstance(first, Tensor):
        return _join_tensors(samples, values)
    if isinstance(first, Mapping):
        return {key: _join(samples, [v[key] for v in values], numbers) for key in first}
    if isinstance(first, (tuple, list)):
        items = [_join(samples, [*column], numbers) for column in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if len(values) == 1 or all(value == first for value in values):
        return first
    if isinstance(first, (int, float)):
        total = max(sum(samples), 1)
        return sum(n * value for n, value in zip(samples, values, strict=True)) / total
    raise UsageError(
        f"compute_loss returned a {type(first).__name__} beside the loss, and a step has "
        f"{len(values)} micro-batches: only tensors with a row for each sample, and numbers, can "
        "be joined. Return these."
    )


def _join_tensors(samples: list[int], values: list[Tensor]) -> Tensor:
    first = values[0]
    if first.dim() == 0:
        if len(values) == 1:
            return first
        weights = tensor_on(samples, torch.float64, first.device)
        stacked = torch.stack(values).double()
        mean = (stacked * weights).sum() / weights.sum().clamp(min=1)
        return mean.to(first.dtype if first.is_floating_point() else torch.get_default_dtype())
    by_rows = all(v.shape[0] == max(n, 1) for n, v in zip(samples, values, strict=True))
    if by_rows:
        return torch.cat([value[:n] for n, value in zip(samples, values, strict=True)])
    if len(values) == 1:
        return first
    raise UsageError(
        f"compute_loss returned a tensor of shape {tuple(first.shape)} beside the loss, for a "
        f"micro-batch of {samples[0]} samples: those of several micro-batches cannot be joined. "
        "Return a row for each sample."
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what tuples, lists and mappings hold, in order."""
    if not isinstance(value, (Mapping, tuple, list)):
        yield value
        return
    for item in value.values() if isinstance(value, Mapping) else value:
        yield from _leaves(item)
