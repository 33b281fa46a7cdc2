"""An addend to the loss that a user's function has returned, for its gradient alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.strategies import base
from shoal.strategies.loss_terms import Counted, Term, split_result


def with_gradient(result: Any, addend: Tensor, micro: base.LocalBatch) -> Any:
    """Return a result of compute_loss whose loss has `addend` more, undivided by any weight."""
    terms, _ = split_result(result)
    weight = 1.0 if micro.loss_weight is None else micro.loss_weight
    first = terms[0]
    scale: Any = float(micro.global_batch_size)  # what `weighted_loss` divides a sum by
    if first.count is None or micro.loss_weight is not None:
        scale = scale / (max(micro.num_samples, 1) * weight)
    if first.count is not None and micro.loss_weight is not None:
        scale = scale * first.count.clamp(min=1)
    replaced = Term(first.value + addend * scale, first.count)
    loss: Any = Counted((replaced, *terms[1:])) if _is_counted(result) else replaced.value
    return (loss, result[1]) if isinstance(result, tuple) else loss


def _is_counted(result: Any) -> bool:
    return isinstance(result[0] if isinstance(result, tuple) else result, Counted)
