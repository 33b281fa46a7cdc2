"""Backward passes that have no backward pass of their own."""

from __future__ import annotations

import torch

from shoal.errors import StrategyRefused


def check_first_derivative() -> None:
    """Check that nobody asks for the gradient of a gradient. Called in a backward pass.

    Raises:
        StrategyRefused: the backward pass is recorded, by create_graph=True.
    """
    if torch.is_grad_enabled():
        raise StrategyRefused(
            "tensor: compute_loss differentiates a gradient (create_graph=True), through a layer "
            "in slices that knows first derivatives only: a fused matrix, logits, or tokens. Leave "
            "out sequence, keep the layer whole by the strategy's option `whole`, or use ddp."
        )
