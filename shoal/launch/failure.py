"""Why a rank failed, and which of several failures was the cause of the others."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from shoal.errors import PeerLost, ServerLost, ShoalError

# Modules that only lead to the user's code; their frames say nothing about the failure.
PATH_TO_THE_TARGET = ("shoal.launch.rank", "shoal.testing.world", "runpy")
LOST_PEER_PATTERNS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "connection was closed",
)
TERMINATION_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
)  # by which somebody asks a process to end
HINTS = {signal.SIGKILL: " (out of memory?)", signal.SIGBUS: " (shared memory full?)"}


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Args: rank: whose. time_s: when, on this machine's monotonic clock. headline: what happened, as
        the rest of a sentence that begins with the rank. text: the whole traceback, or the message
        of a ShoalError; empty where there is only an exit code. is_echo: it looks like the
        consequence of another rank's end (a connection was lost). code: what the launcher exits
        with because of it, 1 to 255. is_loss: a process is gone that nobody asked to end; nothing
        says that the program is wrong.
    """

    rank: int
    time_s: float
    headline: str
    text: str
    is_secondary: bool
    code: int
    is_loss: bool = False

    def describe(self, world: int) -> str:
        """What a user reads; the traceback stands last and whole."""
        who = f"rank {self.rank} of {world}"
        if not self.headline:
            return self.text if world == 1 else f"{who}: {self.text}"
        return "\n\n".join(part for part in (f"{who} {self.headline}", self.text) if part)

    def summary(self, world: int) -> str:
        """What happened, in one sentence without a full stop."""
        if self.headline:
            return f"rank {self.rank} of {world} {self.headline}"
        return self.text.splitlines()[0].partition(". ")[0].rstrip(".")


def from_exception(rank: int, error: BaseException) -> Failure:
    """The failure that `error` is; must be called in the rank, where its frames still exist."""
    time_s, is_echo = time.monotonic(), _looks_like_a_lost_peer(error)
    if isinstance(error, ShoalError):
        return Failure(
            rank, time_s, "", str(error), is_echo, code=1, is_loss=isinstance(error, ServerLost)
        )
    headline = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    text = "".join(traceback.format_exception(type(error), error, _frames(error))).rstrip()
    return Failure(rank, time_s, f"failed: {headline}", text, is_echo, code=1)


def from_exit_code(rank: int, code: int) -> Failure:
    """The failure of a rank that ended without a word; a negative code is the signal that
    killed it.
    """
    if code >= 0:
        return Failure(
            rank,
            time.monotonic(),
            f"ended with exit code {code}",
            "",
            is_secondary=False,
            code=code,
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    headline = f"was killed by {name}{HINTS.get(signal.Signals(-code), '') if name.startswith('SIG') else ''}"
    is_loss = -code not in TERMINATION_SIGNALS
    return Failure(
        rank, time.monotonic(), headline, "", is_secondary=False, code=128 - code, is_loss=is_loss
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The earliest failure that is no echo of another; the earliest of all where there are only
    echoes.
    """
    return min(failures, key=lambda failure: (failure.is_secondary, failure.time_s))


def _frames(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in PATH_TO_THE_TARGET:
        frames = frames.tb_next
    # A script that cannot be parsed has no frame of its own, and its error says where it is wrong.
    return frames if frames is not None or isinstance(error, SyntaxError) else error.__traceback__


def _looks_like_a_lost_peer(error: BaseException) -> bool:
    distributed = sys.modules.get("torch.distributed")
    if isinstance(error, (ConnectionError, PeerLost)) or (
        distributed and isinstance(error, distributed.DistError)
    ):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in LOST_PEER_PATTERNS
    )
