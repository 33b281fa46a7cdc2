"""Dropout on values that are divided, such as attention weights, with the numbers of one device.

      one device   draws   [ head 0  head 1  head 2  head 3 ]
      rank 0       draws   [ head 0  head 1  head 2  head 3 ]   and keeps heads 0 1
      rank 1       draws   [ head 0  head 1  head 2  head 3 ]   and keeps heads 2 3

Each rank draws for all heads, so that the random generators of all ranks stay equal.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.comm.axis import Axis
from shoal.comm.mappings import local_slice
from shoal.platform.torch_private.kernels import safe_softmax

HEADS_DIM = -3
"""The dim of heads in (..., heads, time, time)."""


class GlobalDropout(TorchFunctionMode):
    """Inside, dropout on tensors of 4 dims or more draws for the heads of all ranks.

    All other functions are unchanged.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **options)
        # `shoal verify` puts a function around it, which is not what torch names here.
        if func is unwrap(F.scaled_dot_product_attention):
            rate = args[4] if len(args) > 4 else options.get("dropout_p", 0.0)
            if rate > 0:
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
        """Compute F.scaled_dot_product_attention step by step, so that its dropout is ours."""
        if enable_gqa:
            groups = query.shape[HEADS_DIM] // key.shape[HEADS_DIM]
            key = key.repeat_interleave(groups, dim=HEADS_DIM)
            value = value.repeat_interleave(groups, dim=HEADS_DIM)
        score_scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ key.transpose(-2, -1) * score_scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            is_boolean = attn_mask.dtype == torch.bool
            scores = (
                scores.masked_fill(~attn_mask, -torch.inf) if is_boolean else scores + attn_mask
            )
        weights = safe_softmax(scores, -1)  # a row with all keys masked is 0, as in torch's kernels
        factors = dropout_factors(weights, dropout_p, self.axis)
        attended: Tensor = weights * factors @ value
        return attended


def dropout_factors(x: Tensor, p: float, axis: Axis, dim: int = HEADS_DIM) -> Tensor:
    """Return 0 or 1/(1-p) for each value of this rank, drawn for the values of all ranks.

    Args: dim: along which ranks divide; that of heads for attention weights.
    """
    shape = list(x.shape)
    shape[dim] *= axis.size
    factors = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p)
    # A clone: a view would keep the factors of all ranks until the backward pass.
    return local_slice(factors, axis, dim).clone()
