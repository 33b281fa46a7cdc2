"""A note about the first loss that is not finite. Steps go on: a script may skip them itself.

On the CPU each loss is looked at. On a device the look would wait for the device, so it comes at
steps 1, 2, 4, ... 64, and then at every 64th; a loss that is not a number stays so as a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from shoal.run.step_output import StepOutput
from shoal.strategies.base import LOSS_SUM

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

    def look(self, output: StepOutput) -> None:
        """Look at the global loss of a step. It is the same on every rank."""
        self._steps += 1
        if output.numbers is not None:
            # The sum over samples, which is at hand, is finite if their mean is.
            if not isfinite(output.numbers[LOSS_SUM]):
                self._announce_once(output.loss.item(), "in")
        elif self._is_due() and not isfinite(loss := output.loss.item()):
            self._announce_once(loss, "in or before")

    def _is_due(self) -> bool:
        step = self._steps
        return step % LONGEST_INTERVAL == 0 or (step <= LONGEST_INTERVAL and not step & step - 1)

    def _announce_once(self, value: float, when: str) -> None:
        if not self._announced:
            self._announced = True
            self._announce(
                f"note: the loss is {value} {when} step {self._steps}, and so are the gradients; a "
                "step by them makes all weights so. This is noted once."
            )
