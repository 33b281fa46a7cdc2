"""A run: one start of its ranks, or several after lost ranks and on other numbers of ranks.

      start 4 ──> a rank is killed ──> end the others ──────────> start 4 from the last checkpoint
      start 4 ──> `shoal scale` ──> all stop and save at a step ─> start 6 from there

This module knows nothing of checkpoints: ranks resume by themselves. It does not restart a program
that failed with an exception, because the program would fail again, unless hosts do not reach each
other. Nor does it restart a run that loses a rank in the same way twice without a checkpoint in
between. Requests of `shoal scale` come one at a time:

    {"scale": 6} ──> refused, or: all ranks get a SIGTERM ───> {"stopping": 4}
                     they have saved and ended, 6 are started ─> {"processes": 6, "step": 47}
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from shoal.launch.control_channel import ControlServer, send
from shoal.launch.output import Output, print_note
from shoal.launch.rank_set import RankSet
from shoal.launch.start import imported, start
from shoal.launch.supervise import Supervision, arrived, caught, stop_arrived

# `shoal scale` reaches a run at most so long after the run has claimed its directory.
CONTROL_OPEN_S = 0.1


@dataclass
class Work:
    """The work of all ranks, on this host; see `HostsJob` for several.

    Args:
        target: `module:function`, called in every rank. The import of the module must neither
            start threads nor touch CUDA. Work that is resumed must save after a SIGTERM and end
            with exit code 75; when it is called again it must resume from there.
        arguments: of the first start, plain data of JSON.
        again: of every later start; None for the same.
        environment: variables of the ranks alone.
        output: the outputs that the user sees.
        preload: modules that are imported before ranks are forked, besides that of `target`.
        torch_store: as for `start`, on this host; ranks of several hosts always have one.
        find_step: `module:function` and its arguments, which returns the step from which the next
            start resumes; None for work that is not resumed.
        check: returns why so many ranks cannot do the work; empty where they can.
        secret: of a job on several hosts; None on one, where ranks find what they share in files.
    """

    target: str
    arguments: Sequence[Any]
    again: Sequence[Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    output: Output = "first"
    preload: Sequence[str] = ()
    torch_store: bool = False
    find_step: tuple[str, Sequence[Any]] | None = None
    check: Callable[[int], Sequence[str]] = field(default=lambda processes: ())
    secret: bytes | None = None

    @property
    def modules(self) -> list[str]:
        """The modules to import before ranks are forked."""
        return [*self.preload, self.target.partition(":")[0]]

    def arguments_of(self, again: bool) -> Sequence[Any]:
        """Return the arguments of the first start, or of a later one."""
        return self.again if again and self.again is not None else self.arguments

    def problems(self, processes: int) -> Sequence[str]:
        """Return why `shoal scale` cannot give the run so many ranks; empty where it can."""
        return self.check(processes)

    def saved_step(self) -> int | None:
        """Return the step from which the next start resumes; None for the beginning."""
        if self.find_step is None:
            return None
        function, arguments = self.find_step
        step: int | None = imported(function)(*arguments)
        return step

    def start(self, processes: int, again: bool, signals: socket.socket | None) -> RankSet:
        """Start the ranks; none where a SIGINT or SIGTERM has come meanwhile.

        Args:
            again: they resume.
            signals: as `supervise.caught` yields it; None where nothing is caught yet.

        Raises: LaunchError: they cannot start.
        """
        return start(
            imported(self.target),
            tuple(self.arguments_of(again)),
            processes,
            self.environment,
            self.output,
            preload=self.modules,
            torch_store=self.torch_store,
            is_stopped=lambda: signals is not None and stop_arrived(signals),
        )

    def available(self, processes: int, signals: socket.socket) -> int:
        """Return how many ranks can be started now in place of `processes`, after a loss.

        Args:
            processes: the number of ranks before.
            signals: as `supervise.caught` yields it. It is not read; once it can be, a wait for
                lost hosts ends.

        Returns:
            The number; 0 where the run cannot go on.
        """
        return processes


class RestartingRun:
    """The state of a run over all of its starts.

    Args:
        job: the work of the ranks.
        processes: the number of ranks of the first start.
        control: the server for commands such as `shoal scale`; None for a run that takes none.
        restarts: how often all ranks may be started again after the loss of one.

    Attributes:
        made: restarts so far.
        requested: the ranks of the next start, by the request of `shoal scale` that the run works
            on; None without one. There is one at a time.
    """

    def __init__(
        self,
        job: Work,
        processes: int,
        control: ControlServer | None = None,
        restarts: int = 0,
    ) -> None:
        self.job = job
        self.processes = processes
        self.control = control
        self.restarts = restarts
        self.made = 0
        self.requested: int | None = None
        self._caller: socket.socket | None = None
        self._last_loss: tuple[str, int | None] | None = None

    def run(self, ranks: RankSet | None = None) -> int:
        """Start the ranks, again and again where that is right. Main thread only.

        The first failure ends the other ranks, and is printed last and in full. Ctrl-C ends all
        ranks. A SIGTERM to this process is forwarded to them.

        Args: ranks: of the first start, where it was made before signals are caught.

        Returns:
            The exit code of the command: 0; 75 if ranks stopped with 75 ("run me again") and none
            failed; 130 after Ctrl-C; 143 if a SIGTERM ended ranks that did not save; else that of
            the rank that failed first, 128 + n for signal n.

        Raises:
            LaunchError: the number of ranks is below 1, or they could not be started.
        """
        # First, or a SIGTERM while ranks start would end this process alone.
        with caught() as signals:
            ranks = ranks or self.job.start(self.processes, False, signals)
            while True:
                with ranks:
                    supervision = self._supervise(ranks, signals)
                if not (self._may_rescale(supervision) or self._may_restart(supervision, signals)):
                    self._answer(refused="it has ended before it could go on.")
                    return supervision.exit_code()
                # Asked before the ranks start: a job on several hosts asks these, and what its
                # ranks say meanwhile is lost.
                step = None if self.requested is None else self.job.saved_step()
                ranks = self.job.start(self.processes, True, signals)
                self._answer(processes=self.requested, step=step)

    def _supervise(self, ranks: RankSet, signals: socket.socket) -> Supervision:
        """Supervise the ranks until all have ended.

        Return earlier where a rank is lost and a restart follows: then no rank needs to save.
        """
        supervision = Supervision(ranks)
        while True:
            for number in arrived(signals):
                supervision.forward(number)
            is_restarted = self.made < self.restarts and _has_lost_rank(supervision)
            if is_restarted or not ranks.alive:
                return supervision
            timeout_s, sources = inf, [signals]
            if self.control is not None:
                if problem := self.control.open():
                    print_note(f"`shoal scale` cannot reach this run: {problem}")
                # The run claims its directory without an event, so look for it.
                timeout_s = CONTROL_OPEN_S if self.control.is_pending else inf
                sources += self.control.sources
            supervision.step(timeout_s, sources)
            for caller, request in [] if self.control is None else self.control.accept_requests():
                self._on_request(caller, request, supervision)

    def _may_restart(self, supervision: Supervision, signals: socket.socket) -> bool:
        """Return True if the ranks start again after a loss. Print that, or why not."""
        cause = supervision.cause
        if cause is None or self.restarts == 0 or not _has_lost_rank(supervision):
            return False
        loss = cause.summary(self.processes)
        saved_step = self.job.saved_step()
        if self.made >= self.restarts:
            times = "once" if self.restarts == 1 else f"{self.restarts} times"
            print_note(f"it was started again {times}; that is all (--restarts {self.restarts})")
            return False
        if (loss, saved_step) == self._last_loss:
            print_note(
                "the same again, and no checkpoint in between: another restart would end in the "
                "same way"
            )
            return False
        self._last_loss = (loss, saved_step)
        self.made += 1
        # A rank may have been lost while all stopped for `shoal scale`.
        self.processes = self.requested or self.processes
        found = self.job.available(self.processes, signals)
        if found == 0:
            for number in arrived(signals):
                supervision.forward(number)
            return False
        self.processes = found
        count = f"restart {self.made} of {self.restarts}"
        print_note(f"{loss}; {self._describe_start(saved_step)} ({count})")
        return True

    def _describe_start(self, step: int | None) -> str:
        start = "1 process starts" if self.processes == 1 else f"{self.processes} processes start"
        if step is None:
            return f"{start} from the beginning, for there is no checkpoint"
        return f"{start} from the checkpoint of step {step}"

    # Requests of commands

    def _on_request(
        self, caller: socket.socket, request: Mapping[str, Any], supervision: Supervision
    ) -> None:
        """Make the ranks stop for `shoal scale`, tell the secret, or refuse a request."""
        processes = request.get("scale")
        if "secret" in request and self.job.secret is not None:  # only its own user can ask
            send(caller, secret=self.job.secret.hex())
        elif "secret" in request:
            reason = "its servers are on this machine, and their key is in a file there."
            send(caller, refused=reason)
        elif not isinstance(processes, int) or isinstance(processes, bool):
            send(caller, refused="this is no request that its launcher knows.")
        elif reason := self._refusal_reason(processes, supervision):
            send(caller, refused=reason)
        else:
            self.requested = processes
            self._caller = caller
            send(caller, stopping=len(supervision.ranks.all))
            supervision.stop()
            return
        caller.close()

    def _may_rescale(self, supervision: Supervision) -> bool:
        """Return True if ranks have stopped for `shoal scale`; print that and set the number.

        The run cannot go on if a rank has failed, a signal ended the run, or it is complete.
        """
        is_complete = set(supervision.codes.values()) == {0}
        has_failed = supervision.stop_signal is not None or supervision.cause is not None
        if self.requested is None or is_complete or has_failed:
            return False
        previous, self.processes = self.processes, self.requested
        start = self._describe_start(self.job.saved_step())
        print_note(f"{previous} stopped for `shoal scale`; {start}")
        return True

    def _answer(self, **message: Any) -> None:
        """Answer the request that the run works on, if there is one."""
        if self._caller is not None:
            send(self._caller, **message)
            self._caller.close()
        self.requested = self._caller = None

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


def _has_lost_rank(supervision: Supervision) -> bool:
    """Return True if the root cause is a loss, and nobody has asked the run to stop."""
    cause = supervision.cause
    return cause is not None and cause.is_loss and supervision.stop_signal is None
