"""The result of a step, as the training loop and the checks after it see it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class StepOutput(NamedTuple):
    """The result of a step for the training loop.

    Attributes:
        loss: the global mean loss, a detached scalar.
        extra: values beside the loss, for this rank's samples; None if there are none.
        totals: (TOTALS_LENGTH,), of the step over all ranks.
        numbers: the totals as Python's numbers; None on a device, where reading them would wait
            for the step.
    """

    loss: Tensor
    extra: Any
    totals: Tensor
    numbers: list[float] | None


def numbers_at_hand(totals: Tensor) -> list[float] | None:
    """Return the totals as numbers; None on a device, where that would wait for the step."""
    return totals.tolist() if totals.is_cpu else None
