"""Stages that wait for a fixed time in place of computing, and tell when: two cores are enough
for all of them.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn


class Diary:
    """The work of one rank in a step.

    Attributes:
        unit_s: how long a forward pass waits, a backward pass for inputs, and one for weights.
        spans: (start, end) of each piece of work, on the clock that all ranks share.
        held, peak: activations that are alive, and the most there were.
    """

    def __init__(self) -> None:
        self.unit_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.held = self.peak = 0

    def wait(self) -> None:
        """Work for one unit."""
        start = time.monotonic()
        time.sleep(self.unit_s)
        self.spans.append((start, time.monotonic()))

    def hold(self, kept: Any) -> None:
        """Count what a forward pass keeps, for as long as it is kept."""
        self.held += 1
        self.peak = max(self.peak, self.held)
        weakref.finalize(kept, self._let_go)

    def _let_go(self) -> None:
        self.held -= 1


DIARY = Diary()


class _Kept:
    """Stands for the activations of one micro-batch in one stage."""


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        DIARY.wait()
        ctx.kept = _Kept()
        DIARY.hold(ctx.kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        DIARY.wait()
        return gradient.clone()


class _Weights(torch.autograd.Function):
    """On a branch of its own, so that the half of the backward pass that is for inputs goes
    past it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        DIARY.wait()
        return gradient.clone()


class Waiting(nn.Module):
    """A layer that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        # The model's input has no gradient; here the first stage is to take as long as all others.
        x = x if x.requires_grad else x.requires_grad_()
        return _Inputs.apply(x) + _Weights.apply(self.weight)


def waiting(stages: int) -> nn.Sequential:
    """A model of so many layers that wait; nothing else takes time."""
    return nn.Sequential(*(Waiting() for _ in range(stages)))
