"""A note about the first loss that is not finite. Steps go on: a script may skip them itself.

On the CPU each loss is looked at. On a device the look would wait for the device, so it comes at
steps 1, 2, 4, ... 64, and then at every 64th; a loss that is not a number stays so as a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

LONGEST_INTERVAL = 64


class LossWatch:
    """Announces the first loss that is not finite.

    Args:
        announce: called with a line, on this rank.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._steps = 0
        self._announced = False

    def look(self, loss: Tensor) -> None:
        """Look at the global loss of a step. It is the same on every rank."""
        self._steps += 1
        step = self._steps
        if self._announced:
            return
        is_due = step % LONGEST_INTERVAL == 0 or (step <= LONGEST_INTERVAL and not step & step - 1)
        if loss.device.type == "cpu" or is_due:
            value = loss.item()
            if not math.isfinite(value):
                self._announced = True
                at = "in" if loss.device.type == "cpu" else "in or before"
                self._announce(
                    f"note: the loss is {value} {at} step {step}, and so are the gradients; a step "
                    "by them makes all weights so. This is noted once."
                )
