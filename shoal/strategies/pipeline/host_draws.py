"""The numbers that a step of a pipeline draws from the generators of Python and NumPy.

      each stage of each micro-batch     begins in the state in which the step began
      after the step, on all ranks       the state in which the last stage has left them

So they count for the whole batch, and are those of one device. States travel between ranks only
where a function was seen to draw.
"""

from __future__ import annotations

from shoal.comm.axis import Axis
from shoal.data.host_generators import HostGenerators


class HostDraws:
    """The generators of Python and NumPy in the steps of a pipeline.

    Args:
        axis: the pipeline axis.
        is_last: this rank holds the last stage.

    Attributes:
        begin: the state in which the functions of a step begin.
        met: a function was seen to draw; the same on all ranks.
    """

    def __init__(self, axis: Axis, is_last: bool) -> None:
        self.axis = axis
        self.is_last = is_last
        self.met = False
        self.begin = self._after = HostGenerators.now()

    def begin_step(self) -> None:
        """Begin in the state of this moment. Collective."""
        self.begin = self._after = HostGenerators.now()
        if self.met:
            self.share()

    def share(self) -> None:
        """Begin in the state of the first rank: a script may have drawn on one rank alone.
        Collective.
        """
        self.met = True
        self.begin = self._after = HostGenerators.of_text(
            self.axis.broadcast_str(self.begin.text())
        )
        self.begin.restore()

    def end_last_stage(self) -> None:
        """Note the state in which the last stage has left the generators."""
        self._after = HostGenerators.now() if self.begin.has_moved() else self.begin

    @property
    def has_drawn(self) -> bool:
        """True on the rank of the last stage if a function has drawn in this step."""
        return self.is_last and self._after != self.begin

    def end_evaluation(self) -> None:
        """Leave the generators as a function without gradients has left them. Collective."""
        self.end_step(self.met and self.axis.sum_of_host_numbers([self.has_drawn])[0] > 0)

    def end_step(self, has_drawn: bool) -> None:
        """Leave the generators as one run of the function leaves them. Collective.

        Args: has_drawn: on the rank of the last stage; the same on all ranks.
        """
        if has_drawn:
            self.met = True
            texts = self.axis.all_gather_str(self._after.text() if self.is_last else "")
            self._after = HostGenerators.of_text(next(text for text in texts if text))
            self._after.restore()
        elif self.begin.has_moved():
            self.begin.restore()
