"""Optimizers that PyTorch lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.optim.adamw8bit import AdamW8bit

__all__ = ["AdamW8bit"]


def __getattr__(name: str) -> Any:
    # Loaded at first use, for it needs torchao, which is an extra.
    if name != "AdamW8bit":
        raise AttributeError(f"module 'shoal.optim' has no attribute '{name}'")
    from shoal.optim.adamw8bit import AdamW8bit

    return AdamW8bit
