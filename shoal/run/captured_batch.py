"""Tensors of a whole batch that a function reads from around it, where it is called on parts.

for x, y in batches:
    run.forward_backward(lambda x: F.cross_entropy(model(x), y), x)     y is not divided
    run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from shoal.data.tree_map import SPARSE
from shoal.errors import ShoalError, UsageError
from shoal.strategies.base import LocalBatch

_QUOTING = ("and fails on", "needs the value itself", "compute_loss ends with")
"""Words of our own errors that quote one of torch: of a trial on parts, and of a pipeline."""


def captured_batch_error(error: Exception, batch: LocalBatch, function: Any) -> UsageError | None:
    """Return what to raise in place of torch's error about a tensor of the whole batch.

    None for an error that names no such number of rows.

    Args: function: the user's own function of the batch.
    """
    if isinstance(error, ShoalError) and not any(each in str(error) for each in _QUOTING):
        return None
    # Of all ranks, of this one.
    wholes = {batch.global_batch_size, batch.num_samples} - {0, 1}
    for name, tensor in captured_tensors(function):
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows not in wholes or not re.search(rf"(?<!\d){rows}(?!\d)", str(error)):
            continue
        if tensor.layout in SPARSE:
            return UsageError(
                f"compute_loss reads {name}, a sparse tensor of shape {tuple(tensor.shape)}, from "
                "around it, and is called on parts of the batch (accumulate, micro-batches of a "
                "pipeline, or its first samples to plan). A graph couples all rows of a batch, so "
                "it stays in one piece: give each rank graphs of its own (ddp or zero, no "
                "pipeline, accumulate=1)."
            )
        return UsageError(
            f"compute_loss reads {name} of shape {tuple(tensor.shape)} from around it: the "
            f"rows of the whole batch. It is called on parts of the batch (accumulate, "
            "micro-batches of a pipeline, or its first samples to plan), and only its "
            f"arguments are divided. Pass {name} too: run.forward_backward(compute_loss, ..., "
            f"{name})."
        )
    return None


def captured_tensors(function: Any, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function reads from around it, with their names."""
    if isinstance(function, partial):
        bound = {f"argument {index}": value for index, value in enumerate(function.args)}
        yield from _tensors({**bound, **function.keywords}, depth)
        yield from captured_tensors(function.func, depth)
        return
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    variables = inspect.getclosurevars(function)
    yield from _tensors({**variables.globals, **variables.nonlocals}, depth)
    defaults = inspect.signature(function).parameters
    yield from _tensors({name: each.default for name, each in defaults.items()}, depth)


def _tensors(values: dict[str, Any], depth: int) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif depth and inspect.isfunction(value):
            yield from captured_tensors(value, depth - 1)
