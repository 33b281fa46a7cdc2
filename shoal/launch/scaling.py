"""Requests of `shoal scale`: another number of ranks, from the next step on.

{"scale": 6} ──> refused, or: all ranks get a SIGTERM ───> {"stopping": 4}
                 they have saved and ended, 6 are started ─> {"processes": 6, "step": 47}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.launch.control_channel import ControlConnection
from shoal.launch.job_spec import ResumableJob
from shoal.launch.supervise import Supervision


class Scaling:
    """The request that a run works on; there is one at a time.

    Attributes:
        requested: the number of ranks for the next start; None without a request.
    """

    def __init__(self, job: ResumableJob) -> None:
        self.job = job
        self.requested: int | None = None
        self._caller: ControlConnection | None = None

    def on_request(
        self, caller: ControlConnection, request: Mapping[str, Any], supervision: Supervision
    ) -> None:
        """Make the ranks stop for a request that can be met; refuse any other."""
        processes = request.get("scale")
        if not isinstance(processes, int) or isinstance(processes, bool):
            reason = "this is no request that its launcher knows."
        else:
            reason = self._refusal_reason(processes, supervision)
        if reason:
            caller.send(refused=reason)
            caller.close()
            return
        self.requested = processes
        self._caller = caller
        caller.send(stopping=len(supervision.ranks.all))
        supervision.stop()

    def is_ready(self, supervision: Supervision) -> bool:
        """Return True if all ranks have stopped for the request, and the run can continue.

        It cannot if a rank has failed, if a signal ended the run, or if the run is complete.
        """
        is_complete = set(supervision.codes.values()) == {0}
        return (
            self.requested is not None
            and supervision.stop_signal is None
            and supervision.cause is None
            and not is_complete
        )

    def saved_step(self) -> int | None:
        """Return the step for the answer; None without a request.

        Ask before the ranks start: a job on several hosts asks these, and what its ranks say
        meanwhile is lost.
        """
        return None if self.requested is None else self.job.saved_step()

    def confirm(self, step: int | None) -> None:
        """Answer that the requested number of ranks has started from a step."""
        self._answer(processes=self.requested, step=step)

    def cancel(self) -> None:
        """Answer that the run has ended."""
        self._answer(refused="it has ended before it could go on.")

    def _answer(self, **message: Any) -> None:
        if self._caller is not None:
            self._caller.send(**message)
            self._caller.close()
        self.requested = None
        self._caller = None

    def _refusal_reason(self, processes: int, supervision: Supervision) -> str:
        """Return why the run cannot have so many ranks now; empty where it can."""
        world = len(supervision.ranks.all)
        if processes < 1:
            return f"{processes} processes were asked for; at least one is needed."
        if supervision.stop_signal is not None:
            return "it was told to stop, and is about to end."
        if supervision.failures:
            return "one of its ranks has just failed. Ask again if it goes on."
        if self.requested is not None:
            return (
                f"its {world} processes are stopping already, to go on as {self.requested}. "
                "Ask again then."
            )
        if processes == world:
            return f"it has {world} processes already."
        return " ".join(self.job.problems(processes))
