"""What `shoal scale` asks of a run's launcher: another number of ranks, from the next step on.

{"scale": 6} ──> refused, or: all ranks are told to stop ──> {"stopping": 4}
                 they have saved and ended, 6 are started ─> {"processes": 6, "step": 47}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.launch.control_server import ControlConnection
from shoal.launch.job_spec import JobSpec
from shoal.launch.supervise import Supervision


class Scaling:
    """One wish at a time.

    Attributes: wanted: the number of ranks that the next start is to have; None if nobody waits for
    another."""

    def __init__(self, work: JobSpec) -> None:
        self.work = work
        self.wanted: int | None = None
        self._caller: ControlConnection | None = None

    def take(
        self, caller: ControlConnection, request: Mapping[str, Any], supervision: Supervision
    ) -> None:
        """Have the ranks stop for a request that can be met; refuse any other."""
        wanted = request.get("scale")
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            refusal = "this is no request that its launcher knows."
        else:
            refusal = self._refusal(wanted, supervision)
        if refusal:
            caller.say(refused=refusal)
            caller.close()
            return
        self.wanted, self._caller = wanted, caller
        caller.say(stopping=len(supervision.ranks.all))
        supervision.stop()

    def is_done(self, supervision: Supervision) -> bool:
        """Whether all ranks have stopped for it, and none has failed; nor is the run complete,
        nor was it ended.
        """
        complete = set(supervision.codes.values()) == {0}
        return (
            self.wanted is not None
            and supervision.asked is None
            and supervision.cause is None
            and not complete
        )

    def confirm(self) -> None:
        """As many as were wanted have been started."""
        self._answer(processes=self.wanted, step=self.work.saved_step())

    def give_up(self) -> None:
        """The run has ended."""
        self._answer(refused="it has ended before it could go on.")

    def _answer(self, **words: Any) -> None:
        if self._caller is not None:
            self._caller.say(**words)
            self._caller.close()
        self.wanted, self._caller = None, None

    def _refusal(self, wanted: int, supervision: Supervision) -> str:
        world = len(supervision.ranks.all)
        if wanted < 1:
            return f"{wanted} processes were asked for; at least one is needed."
        if supervision.asked is not None:
            return "it was told to stop, and is about to end."
        if supervision.failures:
            return "one of its ranks has just failed. Ask again if it goes on."
        if self.wanted is not None:
            return f"its {world} processes are stopping already, to go on as {self.wanted}. Ask again then."
        if wanted == world:
            return f"it has {world} processes already."
        return " ".join(self.work.problems(wanted))
