"""Totals of a step as the gradient of one more parameter, so that torch's engine reduces them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.platform.tensors import accumulation_dtype
from shoal.strategies.base import TOTALS_LENGTH, ForwardOutput, LocalBatch, LocalModel


class TotalsCarrier(nn.Module):
    """The part's module with a parameter whose gradient is the totals of the step.

    Attributes:
        parameter: (SLOTS,), of the first parameter's real dtype, float32 at least.
        engine_searches: the engine searches the autograd graph for what was used.
    """

    def __init__(self, part: LocalModel, device: torch.device) -> None:
        super().__init__()
        self.module = part.module
        self.engine_searches = False
        self._part_forward = part.forward
        first = next(iter(part.trainable_params.values()))
        dtype = accumulation_dtype(first.dtype).to_real()
        self.parameter = nn.Parameter(torch.zeros(TOTALS_LENGTH, dtype=dtype, device=device))

    def reduced_totals(self) -> Tensor:
        """Return the totals' mean over ranks, (SLOTS,), after the backward pass."""
        assert self.parameter.grad is not None
        return self.parameter.grad.clone()  # it lies in a bucket, which the next step overwrites

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        outcome = self._part_forward(batch)
        if not batch.is_last_microbatch:
            return outcome
        # The engine's search of the graph finds operations only, and no leaves.
        carrier = self.parameter.view(TOTALS_LENGTH) if self.engine_searches else self.parameter
        return outcome._replace(
            step_totals=outcome.step_totals.to(carrier.dtype), totals_param=carrier
        )
