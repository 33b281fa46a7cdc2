"""Dropout on slices of heads: drawn for all heads, as one device does, of which a rank keeps
its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.comm.axis import Axis
from shoal.comm.mappings import local_slice
from shoal.platform.torch_private.kernels import safe_softmax

HEADS_DIM = -3


class GlobalDropout(TorchFunctionMode):
    """Inside, dropout on (..., heads, time, time) is that of all ranks' heads; all other
    functions are as they are.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **options)
        if func is F.scaled_dot_product_attention and options.get("dropout_p", 0.0) > 0:
            return self._attention(*args, **options)
        return func(*args, **options)

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if x.dim() < 4 or not training or p == 0:
            return F.dropout(x, p, training, inplace)
        return x * dropout_factors(x, p, self.axis)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            groups = query.shape[HEADS_DIM] // key.shape[HEADS_DIM]
            key, value = (x.repeat_interleave(groups, dim=HEADS_DIM) for x in (key, value))
        scores = (
            query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        )
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            allowed = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if allowed else scores + attn_mask
        weights = safe_softmax(scores, -1)  # a row with all keys hidden is 0
        attended: Tensor = weights * dropout_factors(weights, dropout_p, self.axis) @ value
        return attended


def dropout_factors(weights: Tensor, p: float, axis: Axis) -> Tensor:
    """0 or 1/(1-p) for each weight of this rank's heads, out of those of all ranks."""
    shape = list(weights.shape)
    shape[HEADS_DIM] *= axis.size
    factors = F.dropout(torch.ones(shape, dtype=weights.dtype, device=weights.device), p)
    return local_slice(
        factors, axis, HEADS_DIM
    ).clone()  # or those of all heads are kept for the backward pass
