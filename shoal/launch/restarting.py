"""A run that goes on: its ranks are started again when one is lost, and at another number when that
is asked for.

      start 4 ──> a rank is killed ──> end the others ──────────> start 4 from the last checkpoint
      start 4 ──> `shoal scale` ──> all stop and save at a step ─> start 6 from there

Nothing here knows what a checkpoint is: ranks resume by themselves. A program that is wrong is not
started again, for it would be wrong again; nor is one that is lost in the same way twice without a
checkpoint in between."""

from __future__ import annotations

import socket
import sys
from math import inf

from shoal.launch import rank
from shoal.launch.control_server import ControlServer
from shoal.launch.job_spec import JobSpec
from shoal.launch.local import exit_code
from shoal.launch.ranks import Ranks
from shoal.launch.restart_policy import RestartPolicy
from shoal.launch.scaling import Scaling
from shoal.launch.signals import arrived, caught
from shoal.launch.supervise import Supervision

CONTROL_OPEN_S = 0.1  # at most so long after it has claimed its directory, a run can be called


def run_with_restarts(
    work: JobSpec, processes: int, control: ControlServer, restarts: int, grace_s: float = 60.0
) -> int:
    """Run `work` on `processes` ranks of this machine, to its end. Main thread only.

    Args:
        control: where commands are heard.
        restarts: how often all ranks are started again because one was lost.
        grace_s: as for `shoal.launch.local.run`.

    Returns: the exit code, as `shoal.launch.local.run`.
    Raises: LaunchError: no such number of processes, or ranks that could not be started.
    """
    keeper = RestartingRun(work, processes, control, RestartPolicy(restarts), grace_s)
    try:
        return keeper.run()
    except KeyboardInterrupt:  # between the first start and the time when signals are caught
        return rank.EXIT_INTERRUPTED


class RestartingRun:
    """The state of a run between starts; see `keep`."""

    def __init__(
        self,
        work: JobSpec,
        processes: int,
        control: ControlServer,
        losses: RestartPolicy,
        grace_s: float,
    ) -> None:
        self.work, self.processes, self.control, self.losses = work, processes, control, losses
        self.grace_s, self.scaling = grace_s, Scaling(work)

    def run(self) -> int:
        """To its end."""
        ranks = self.work.begin(self.processes)
        with caught() as signals:
            while True:
                with ranks:
                    supervision = self._watch(ranks, signals)
                if not (self._rescale_requested(supervision) or self._may_restart(supervision)):
                    self.scaling.give_up()
                    return exit_code(supervision)
                ranks = self.work.continue_from(self.processes)
                self.scaling.confirm()

    def _watch(self, ranks: Ranks, signals: socket.socket) -> Supervision:
        """Until all ranks have ended, or one is lost and the others need not save."""
        supervision = Supervision(ranks, self.grace_s)
        while ranks.alive and (self.losses.are_too_many or not _has_lost(supervision)):
            if self.control.is_due and (problem := self.control.open()):
                _note(f"`shoal scale` cannot reach this run: {problem}")
            within_s = CONTROL_OPEN_S if self.control.is_pending else inf
            supervision.step(within_s, also=[signals, *self.control.sources])
            for number in arrived(signals):
                supervision.forward(number)
            for caller, request in self.control.accept_requests():
                self.scaling.take(caller, request, supervision)
        return supervision

    def _rescale_requested(self, supervision: Supervision) -> bool:
        """Whether ranks have stopped so that another number goes on; says so."""
        if not self.scaling.is_done(supervision):
            return False
        before, self.processes = self.processes, self.scaling.wanted or self.processes
        _note(f"{before} stopped for `shoal scale`; {self._start_from(self.work.saved_step())}")
        return True

    def _may_restart(self, supervision: Supervision) -> bool:
        """Whether all ranks start again after a loss; says so."""
        cause = supervision.cause
        if cause is None or not _has_lost(supervision) or self.losses.restarts == 0:
            return False
        what, step = cause.summary(self.processes), self.work.saved_step()
        if objection := self.losses.refusal_reason(what, step):
            _note(objection)
            return False
        self.processes = self.scaling.wanted or self.processes
        _note(
            f"{what}; {self._start_from(step)} (restart {self.losses.made} of "
            f"{self.losses.restarts})"
        )
        return True

    def _start_from(self, step: int | None) -> str:
        who = "1 process starts" if self.processes == 1 else f"{self.processes} processes start"
        where = (
            "the beginning, for there is no checkpoint"
            if step is None
            else f"the checkpoint of step {step}"
        )
        return f"{who} from {where}"


def _has_lost(supervision: Supervision) -> bool:
    return supervision.cause is not None and supervision.cause.is_loss and supervision.asked is None


def _note(text: str) -> None:
    # On a terminal a rank that was killed leaves its progress bar, without the end of its line.
    begin = "\n" if sys.stderr.isatty() else ""
    print(f"{begin}note: {text}", file=sys.stderr, flush=True)
