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
from shoal.run.checks import single_sample_error
from shoal.strategies.base import LocalBatch

_QUOTING = (
    "and fails on",
    "needs the value itself",
    "compute_loss ends with",
    "cannot be told without computing it",
)
"""Words of our own errors that quote one of torch: of a trial on parts, and of a pipeline."""


def explained_error(
    error: Exception, batch: LocalBatch, function: Any, in_parts: bool
) -> Exception:
    """Return what to raise in place of an error of a step: a better one, or itself with a note.

    Args:
        function: the user's own function of the batch.
        in_parts: it is called on parts of this rank's samples.
    """
    found = single_sample_error(error, batch)
    found = found or captured_batch_error(error, batch, function, in_parts)
    if found is None:
        note_part(error, batch, in_parts)
    return found or error


def captured_batch_error(
    error: Exception, batch: LocalBatch, function: Any, in_parts: bool
) -> UsageError | None:
    """Return what to raise in place of torch's error about a tensor of the whole batch.

    None for an error that names no such number of rows. Arguments as in `explained_error`.
    """
    if isinstance(error, ShoalError) and not any(each in str(error) for each in _QUOTING):
        return None
    # Of all ranks, of this one. The larger one first: it is the wrong one where both are told.
    wholes = {batch.global_batch_size, batch.num_samples} - {0, 1}
    told = {size for size in wholes if re.search(rf"(?<!\d){size}(?!\d)", str(error))}
    captured = [*captured_tensors(function)]
    for rows in sorted(told, reverse=True):
        for name, tensor in captured:
            if tensor.shape[:1] == (rows,):
                return _rows_around(name, tensor, of_all_ranks=rows > batch.num_samples)
            # An error of ours quotes one of parts, such as those of a trial.
            is_whole = in_parts or rows > batch.num_samples or isinstance(error, ShoalError)
            if is_whole and rows in tensor.shape and not tensor.requires_grad:
                return UsageError(
                    f"compute_loss reads {name} of shape {tuple(tensor.shape)} from around it, "
                    f"which was made for {rows} samples. It is called on parts of the batch (this "
                    "rank's samples, accumulate, micro-batches of a pipeline, a trial of the "
                    "loss). Make it inside of compute_loss, for as many samples as it is given: "
                    "torch.zeros(1, len(x), ...); or, where it goes from batch to batch, pass it "
                    "and return it with its samples along dimension 0: state.transpose(0, 1)."
                )
    return None


def _rows_around(name: str, tensor: Tensor, of_all_ranks: bool) -> UsageError:
    """Return the error about the rows of a whole batch in a tensor that is no argument.

    Args: of_all_ranks: the rows of the global batch, and not those of this rank.
    """
    read = f"compute_loss reads {name}"
    if tensor.layout in SPARSE:
        return UsageError(
            f"{read}, a sparse tensor of shape {tuple(tensor.shape)}, from "
            "around it, and is called on parts of the batch (accumulate, micro-batches of a "
            "pipeline, or its first samples to plan). A graph couples all rows of a batch, so "
            "it stays in one piece: give each rank graphs of its own (ddp or zero, no "
            "pipeline, accumulate=1)."
        )
    if of_all_ranks:
        return UsageError(
            f"{read} of shape {tuple(tensor.shape)} from around it: as many rows as the batch of "
            "all ranks has. It is called on the samples of this rank, and on parts of them. Make "
            "it for as many samples as the batch that the loop is given: torch.ones(len(x), 1) in "
            f"place of torch.ones({len(tensor)}, 1); or take this rank's rows, run.share({name}). "
            f"And pass it: run.forward_backward(compute_loss, ..., {name})."
        )
    return UsageError(
        f"{read} of shape {tuple(tensor.shape)} from around it: the "
        f"rows of the whole batch. It is called on parts of the batch (accumulate, "
        "micro-batches of a pipeline, or its first samples to plan), and only its "
        f"arguments are divided. Pass {name} too: run.forward_backward(compute_loss, ..., "
        f"{name})."
    )


def note_part(error: Exception, batch: LocalBatch, in_parts: bool) -> None:
    """Add to an error of the user's own code how many samples it was given, if not all of them."""
    if isinstance(error, ShoalError):
        return
    if in_parts or 0 < batch.num_samples < batch.global_batch_size:
        rows, whole = batch.num_samples, batch.global_batch_size
        of_batch = "" if rows == whole else f" (of {whole} in the batch)"
        error.add_note(
            f"shoal: this rank calls compute_loss on {'parts of ' if in_parts else ''}its {rows} "
            f"samples{of_batch}. Code that knows the size of a whole batch (a reshape, a state for "
            "each sample) must take it from its arguments: len(x). A loss that takes several "
            "samples together (topk, pairs) computes with those of all: run.gather(tensor)."
        )


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
        elif type(value) in (tuple, list):
            yield from _tensors({f"{name}[{i}]": each for i, each in enumerate(value)}, 0)
        elif depth and inspect.isfunction(value):
            yield from captured_tensors(value, depth - 1)
