"""Cases of the measurement: the model and the ways to train it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.models import build
from shoal.optim.adamw8bit import AdamW8bit

RANKS = (1, 2, 4, 8)
TIME, VOCABULARY, BATCH = 64, 256, 16
LAYERS, WIDTH = 8, 256
OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "AdamW8bit": AdamW8bit,
    "Adafactor": torch.optim.Adafactor,
}


class Case(NamedTuple):
    """A strategy as its line is written, and an optimizer of `OPTIMIZERS`."""

    strategy: str
    optimizer: str = "AdamW"

    @property
    def label(self) -> str:
        optimizer = [] if self.optimizer == "AdamW" else [self.optimizer]
        return ", ".join([self.strategy, *optimizer])

    @property
    def offloaded(self) -> bool:
        return "offload=true" in self.strategy


CASES = (
    Case("ddp"),
    Case("zero1"),
    Case("zero2"),
    Case("zero3"),
    Case("zero3,offload=true"),
    Case("recompute,ddp"),
    Case("recompute,zero3"),
    Case("recompute=2,zero3"),
    Case("ddp", "Adafactor"),
    Case("ddp", "AdamW8bit"),
    Case("zero3", "Adafactor"),
    Case("zero3", "AdamW8bit"),
)


def gpt() -> nn.Module:
    return build("gpt", VOCABULARY, (TIME,), {"width": WIDTH, "layers": LAYERS, "heads": 8})
