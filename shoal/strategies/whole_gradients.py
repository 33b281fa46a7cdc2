"""Sees that each gradient comes in one piece: what is sent when the first piece is there lacks the others.

      h = layer(x)           backward   one piece: autograd adds up what both calls give ── sent
      y = layer(h)

      h = checkpoint(layer, x, use_reentrant=True)       backward   piece of the 2nd call ── sent │ piece of the 1st
      y = checkpoint(layer, h, use_reentrant=True)                                                  stays on this rank

Each reentrant checkpoint makes a backward pass of its own, and DistributedDataParallel takes the end of the first one
for the end of all: weights would drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from shoal.errors import UsageError


class WholeGradients:
    """Watches parameters by their names."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.arrived: set[str] | None = None  # in the backward pass that runs
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._arrives, name))

    @contextmanager
    def during(self) -> Iterator[None]:
        """The time of one backward pass. Inside it raises UsageError: a second piece of a gradient has come."""
        self.arrived = set()
        try:
            yield
        finally:
            self.arrived = None

    def _arrives(self, name: str, _: Tensor) -> None:
        if self.arrived is None:
            return
        if name in self.arrived:
            raise in_two_pieces(name)
        self.arrived.add(name)


def in_two_pieces(name: str) -> UsageError:
    """What to raise where a second piece of a parameter's gradient has come."""
    return UsageError(
        f"{name}: its gradient came in two pieces in one backward pass, as it does where a module that is "
        "called more than once is recomputed with use_reentrant=True. Use use_reentrant=False."
    )
