"""Whether a run that has lost a rank may go on: so many times, and never in a circle. No
processes here.
"""

from __future__ import annotations


class RestartPolicy:
    """The losses of a run.

    Args: restarts: how many of them it may go on after.
    """

    def __init__(self, restarts: int) -> None:
        self.restarts, self.made = restarts, 0
        self._last: tuple[str, int | None] | None = None

    @property
    def are_too_many(self) -> bool:
        return self.made >= self.restarts

    def refusal_reason(self, what: str, saved_step: int | None) -> str:
        """Why the run shall not go on after `what` was lost, from what was saved last; empty
        where it shall.
        """
        if self.are_too_many:
            times = "once" if self.restarts == 1 else f"{self.restarts} times"
            return f"it was started again {times}; that is all (--restarts {self.restarts})"
        if (what, saved_step) == self._last:
            return "the same again, and no checkpoint in between: another restart would end in the same way"
        self._last, self.made = (what, saved_step), self.made + 1
        return ""
