"""Guesses why a loss is no mean over samples, from the batch and from what the function names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.tree_map import tensors_in
from shoal.trial.draws_of_parts import RecordedDraws
from shoal.trial.loss_verdict import LossKind, LossVerdict
from shoal.trial.saved_objects import reachable

MOST_CLASSES = 100_000
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def guess_cause(
    verdict: LossVerdict, compute_loss: Callable[..., Any], batch: Any, draws: RecordedDraws
) -> LossVerdict:
    """Return an objection with a guess at its cause, unless it has one already."""
    if verdict.cause or verdict.kind is LossKind.SUM:
        return verdict
    if draws.permuted:
        cause = "It mixes the samples of a batch in a random order (torch.randperm)."
        return replace(verdict, cause=cause)
    guesses = (*_ignored_targets(batch), *_class_weights(compute_loss))
    if not guesses or verdict.kind is LossKind.FAILS_ON_PARTS:
        return verdict
    return replace(
        verdict,
        cause=f"It may divide by something that is counted over the batch: {guesses[0]}.",
    )


def _ignored_targets(batch: Any) -> Iterator[str]:
    """Yield the negative number that stands in integer tensors more than once."""
    for tensor in tensors_in(batch):
        if tensor.dtype in (torch.int64, torch.int32) and tensor.numel():
            lowest = int(tensor.min())
            if lowest < 0 and int((tensor == lowest).sum()) > 1:
                yield f"targets of {lowest} look like ignored ones"


def _class_weights(compute_loss: Callable[..., Any]) -> Iterator[str]:
    """Yield a sentence on a weight for each class that the function can reach."""
    for value in reachable(compute_loss):
        weight = value.weight if isinstance(value, _LossWithWeight) else value
        if isinstance(value, nn.Module) and weight is value:
            continue
        if isinstance(weight, Mapping):
            continue
        if (
            isinstance(weight, Tensor)
            and weight.dim() == 1
            and weight.is_floating_point()
            and not weight.requires_grad
            and 1 < weight.numel() <= MOST_CLASSES
        ):
            yield f"a tensor of {weight.numel()} numbers looks like weights of classes"


_LossWithWeight = (nn.CrossEntropyLoss, nn.NLLLoss)


def user_line(frames: StackSummary) -> str:
    """Return ` at file:line` of the innermost frame that is neither torch's nor Shoal's."""
    for frame in reversed(frames):
        if not frame.filename.startswith((*_FOREIGN, "<")) and frame.lineno is not None:
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""
