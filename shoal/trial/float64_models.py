"""Models that compute in float64 for a while, where float32 cannot tell rounding from an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def models_in_float64(models: Sequence[nn.Module]) -> Iterator[None]:
    """Let parameters, buffers and new tensors be float64 inside."""
    tensors = {
        id(tensor): tensor
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point()
    }
    # `.data`, so that optimizers, hooks and tied weights keep the same tensor, and no writing is
    # counted: afterwards all is as before.
    originals = [(tensor, tensor.data) for tensor in tensors.values()]
    default = torch.get_default_dtype()
    try:
        for tensor, original in originals:
            tensor.data = original.double()
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, original in originals:
            tensor.data = original
