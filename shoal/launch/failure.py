"""The failure of a rank, the root cause among several failures, and the report of a lost helper."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.errors import BAD_INPUT, PeerLost, ServerLost, ShoalError, headline_of

# How modules that only call the user's code begin: a traceback is clearer without their frames.
CALLING_MODULES = ("shoal.launch.rank", "shoal.testing.", "shoal.verification.", "runpy")
# Texts of the RuntimeErrors that Gloo and torch raise when a peer has ended.
LOST_PEER_PATTERNS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "connection was closed",
)
# RuntimeErrors of torch's DataLoader; an exception inside of a worker has another text.
LOST_WORKER = re.compile(r"DataLoader worker \(pid.* (is killed by signal|exited unexpectedly)")
# Signals by which a person or a batch system asks a process to end.
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
HINTS = {-signal.SIGKILL: " (out of memory?)", -signal.SIGBUS: " (shared memory full?)"}
EXIT_LOST = 1
_lock = threading.Lock()
_launcher: list[tuple[Connection, int]] = []
"""The connection to the launcher and this rank; empty under another launcher than Shoal's."""
Explain = Callable[[BaseException, str], BaseException | None]
explanations: list[Explain] = []
"""Functions that may know the cause of an error of the script: they take it and the script's line,
and return the error to report in its place, or None.
"""


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Args:
        rank: the rank that failed.
        headline: the rest of a sentence that begins with the rank; empty for a ShoalError.
        text: the full traceback, or the message of a ShoalError; empty where there is only an exit
            code.
        is_secondary: the rank has lost a connection, so another rank probably ended first.
        code: exit code of the launcher because of this failure, 1 to 255.
        is_loss: a process was killed or stopped without a request, or a server shard is lost. The
            program may be right, and a restart may help.
        host: the host of the rank; empty where there is one host.
        process: name of the process that failed, where it is no rank.
        time_s: when, on this machine's monotonic clock.
    """

    rank: int
    headline: str = ""
    text: str = ""
    is_secondary: bool = False
    code: int = 1
    is_loss: bool = False
    process: str = ""
    host: str = ""
    time_s: float = field(default_factory=time.monotonic)

    def describe(self, world: int) -> str:
        """Return the text for the user, which ends with the full traceback."""
        name = self._name(world)
        if not self.headline:
            return self.text if world == 1 else f"{name}: {self.text}"
        headline = f"{name} {self.headline}"
        return f"{headline}\n\n{self.text}" if self.text else headline

    def summary(self, world: int) -> str:
        """Return one sentence without a full stop."""
        if self.headline:
            return f"{self._name(world)} {self.headline}"
        return self.text.splitlines()[0].partition(". ")[0].rstrip(".")

    def _name(self, world: int) -> str:
        name = self.process or f"rank {self.rank} of {world}"
        return f"{name} on {self.host}" if self.host else name


def from_exception(rank: int, error: BaseException) -> Failure:
    """Return the failure for an exception. Call it in the rank, where the frames still exist."""
    line = _script_line(error)
    error = cause_of(error)
    is_secondary = is_lost_peer(error)
    if lost := lost_worker(error):
        return Failure(rank, f"lost a process of its own: {lost}", is_loss=True)
    if isinstance(error, ShoalError):  # its message states fact and cure; a traceback would hide it
        is_loss = isinstance(error, ServerLost)
        text = f"{error}{'' if line in str(error) else f' ({line})'}"
        code = 2 if isinstance(error, BAD_INPUT) else 1
        return Failure(rank, "", text, is_secondary, code, is_loss)
    headline = headline_of(error)
    text = "".join(traceback.format_exception(type(error), error, _frames(error))).rstrip()
    return Failure(rank, f"failed: {headline}", text, is_secondary)


def cause_of(error: BaseException) -> BaseException:
    """Return the error to report for one that ends this process, with its frames."""
    sys.last_value = error  # as an interpreter does, for functions that run at its end
    line = _script_line(error)
    causes = (explain(error, line) for explain in reversed(explanations))
    cause = next(filter(None, causes), error)
    return cause.with_traceback(error.__traceback__)


def end_of_process(code: int) -> str:
    """Return how a process has ended, by its exit code; a negative one is the signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {one.value: one.name for one in signal.Signals}  # most real-time signals have none
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def from_exit_code(rank: int, code: int) -> Failure:
    """Return the failure of a rank that ended without a report.

    Args:
        code: the exit code; a negative one is the signal that killed the rank.
    """
    if code >= 0:
        return Failure(rank, end_of_process(code), code=code)
    headline = f"{end_of_process(code)}{HINTS.get(code, '')}"
    return Failure(rank, headline, code=128 - code, is_loss=-code not in TERMINATION_SIGNALS)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the earliest failure that is not secondary; the earliest of all where all are."""
    return min(failures, key=lambda failure: (failure.is_secondary, failure.time_s))


def lost_worker(error: BaseException) -> str:
    """Return torch's text if a data-loader worker was lost; empty if not.

    torch raises that error wherever the main thread is, so others may have wrapped it. Whoever
    takes errors of any kind for outcomes of its own, such as a save, must let this one pass.
    """
    seen: BaseException | None = error
    while seen is not None:
        if LOST_WORKER.search(str(seen)):
            return str(seen).splitlines()[0].strip().rstrip(".")
        seen = seen.__cause__ or seen.__context__
    return ""


def _script_line(error: BaseException) -> str:
    """Return the innermost line of the user's script, `train.py:41`; empty without a script."""
    line = ""
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__") == "__main__":
            line = f"{Path(frames.tb_frame.f_code.co_filename).name}:{frames.tb_lineno}"
        frames = frames.tb_next
    return line


def _frames(error: BaseException) -> TracebackType | None:
    """Return the frames of the error from the user's code on."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__", "").startswith(CALLING_MODULES):
        frames = frames.tb_next
    # A script that cannot be parsed has no frame of its own, and its error says where it is wrong.
    return frames if frames is not None or isinstance(error, SyntaxError) else error.__traceback__


def is_lost_peer(error: BaseException) -> bool:
    """Return True if the error probably follows from the end of another rank."""
    if isinstance(error, (ConnectionError, PeerLost)):
        return True
    # Where torch.distributed was never imported, none of its errors can have been raised.
    distributed = sys.modules.get("torch.distributed")
    if distributed and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        pattern in str(error) for pattern in LOST_PEER_PATTERNS
    )


def attach_launcher(connection: Connection, rank: int) -> None:
    """Send reports of this process, a rank, over `connection` from now on."""
    _launcher.append((connection, rank))


def report(event: Any) -> None:
    """Send a Failure or a RankResult of this rank to its launcher. Any thread may call."""
    with _lock:
        _launcher[-1][0].send(event)


def report_loss(headline: str) -> None:
    """Report that this rank cannot go on, since it lost a process of its own.

    In a process of another launcher the rank ends instead, so that this launcher acts.

    Args: headline: the rest of a sentence that begins with the rank.
    """
    if not _launcher:
        print(f"this rank {headline}", file=sys.stderr, flush=True)
        os._exit(EXIT_LOST)
    report(Failure(_launcher[-1][1], headline, code=EXIT_LOST, is_loss=True))
