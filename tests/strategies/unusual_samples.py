"""Samples for unusual models."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


def rows() -> TensorDataset:
    """Return 24 samples of six values, each with a target of one value."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(24, width, generator=generator, dtype=torch.float64) for width in (6, 1))
    return TensorDataset(x, y)
