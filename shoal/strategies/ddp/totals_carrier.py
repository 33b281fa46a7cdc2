"""Totals of a step as the gradient of one more parameter, so that torch's engine reduces them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.strategies.base import SLOTS, Batch, Outcome, Part
from shoal.tensors import accumulation_dtype


class TotalsCarrier(nn.Module):
    """The part's module with a parameter whose gradient is the totals of the step.

    Attributes:
        parameter: (SLOTS,), of the first parameter's real dtype, float32 at least.
        engine_searches: the engine searches the autograd graph for what was used.
    """

    def __init__(self, part: Part, device: torch.device) -> None:
        super().__init__()
        self.module = part.module
        self.engine_searches = False
        self._part_forward = part.forward
        first = next(iter(part.owned.values()))
        dtype = accumulation_dtype(first.dtype).to_real()
        self.parameter = nn.Parameter(torch.zeros(SLOTS, dtype=dtype, device=device))

    def reduced_totals(self) -> Tensor:
        """Return the totals' mean over ranks, (SLOTS,), after the backward pass."""
        assert self.parameter.grad is not None
        return self.parameter.grad.clone()  # it lies in a bucket, which the next step overwrites

    def forward(self, batch: Batch) -> Outcome:
        outcome = self._part_forward(batch)
        if not batch.last:
            return outcome
        # The engine's search of the graph finds operations only, and no leaves.
        carrier = self.parameter.view(SLOTS) if self.engine_searches else self.parameter
        return outcome._replace(totals=outcome.totals.to(carrier.dtype), carrier=carrier)
