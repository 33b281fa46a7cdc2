"""Every error that Shoal raises at its users, as one tree.

    ShoalError
    ├── ConfigError          a config file, a flag or a value; carries all problems at once
    ├── EnvironmentConflict  launcher variables that contradict each other or what was asked for
    ├── LaunchError          a rank failed or could not start
    ├── DataError            a data set that is not where it should be, or not what it should be
    ├── StrategyRefused      a model or a world that a strategy cannot take
    ├── UsageError           a call that would have given a wrong gradient or lost something
    ├── TrainingDiverged     numbers that are no longer finite, and that further steps do not mend
    ├── ReplicasDiffer       ranks that should hold the same weights, and do not
    ├── CheckpointError      a checkpoint that is corrupt, missing or of another experiment
    │   └── CleanupFailed    saved, but `latest`, `best` or the removal of old ones failed
    ├── RecordError          a record that cannot be replayed: a gap, or another program
    ├── ServerLost           a parameter server is gone, and nobody holds what it held
    ├── CollectiveFailed     ranks that do not make the same calls, or one that did not come in time
    │   └── PeerLost         a rank that has died or given up while others wait for it
    └── WireError            an untrusted peer: wrong key, damaged or repeated frame
        └── ConnectionLost   a peer on a socket that has gone

A message states the fact, the values and the cure. `assert` is kept for our own bugs.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches


class ShoalError(Exception):
    """Base of all errors that a user can mend; the command line prints it without a traceback."""


class ConfigError(ShoalError):
    """One or more bad settings, reported together.

    Each argument is one problem: `where: what is wrong; what would be right`.
    """

    @property
    def problems(self) -> Sequence[str]:
        return self.args

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        return "\n  ".join([f"{head} in the configuration:", *self.problems])


def problems_of(check: Callable[[], object]) -> list[str]:
    """Return the problems of the ConfigError that a check raises, if it raises one."""
    try:
        check()
    except ConfigError as error:
        return [*error.problems]
    return []


def raise_problems(problems: Sequence[str]) -> None:
    """Raise ConfigError if there are problems."""
    if problems:
        raise ConfigError(*problems)


class EnvironmentConflict(ShoalError):
    """The launcher's variables contradict each other, or what was asked for."""


class LaunchError(ShoalError):
    """A rank failed or could not be started."""


class DataError(ShoalError):
    """A data set is missing or malformed; the message says what belongs where."""


class StrategyRefused(ShoalError):
    """The strategy cannot take this model, world or option; said before training starts."""


class UsageError(ShoalError):
    """A call that would have been silently wrong."""


class TrainingDiverged(ShoalError):
    """The numbers of a run are no longer finite, and further steps do not mend them."""


class ReplicasDiffer(ShoalError):
    """Ranks that should hold the same weights do not."""


class CheckpointError(ShoalError):
    """A checkpoint is corrupt, missing, or belongs to another experiment."""


class CleanupFailed(CheckpointError):
    """A checkpoint is saved and whole, but what belongs to it was not done: its hints, or the
    removal of older ones.
    """


class RecordError(ShoalError):
    """A record of a run that cannot be replayed as it is."""


class ServerLost(ShoalError):
    """A parameter server is gone, and nobody holds what it held."""


class CollectiveFailed(ShoalError, RuntimeError):
    """Ranks do not make the same collective calls, or one did not come in time. The group
    cannot be used any more.
    """


class PeerLost(CollectiveFailed):
    """A rank has died or given up while this one waited for it."""


class WireError(ShoalError):
    """Bytes on a socket that this job's peer would not send. Nothing more is read from it."""


class ConnectionLost(WireError):
    """The peer closed the connection or died, or this end closed it."""


MOST_NAMES = 3
"""Names that a question offers at most."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?", or the list of what is known when nothing is close.

    A few names that begin with the word come before one that is similar.
    """
    names = sorted(known)
    begin_so = [name for name in names if word and name.startswith(word)]
    is_clear = 0 < len(begin_so) <= MOST_NAMES
    close = begin_so if is_clear else get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        return f"known: {', '.join(names)}"
    return f"did you mean {' or '.join(repr(name) for name in close)}?"


BAD_INPUT = (ConfigError, EnvironmentConflict, StrategyRefused, UsageError)
"""Errors in what was given; a command that ends with one, or whose rank does, has exit status 2."""
LONGEST_WORD = 200


def printable(message: str) -> str:
    """Return a message for a terminal: control characters are written out, long words cut.

    What a message quotes may come from a file or a directory of somebody else, and an escape
    sequence could rewrite the screen.
    """
    text = "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in message
    )
    return re.sub(
        rf"\S{{{LONGEST_WORD},}}",
        lambda match: f"{match[0][:80]}... ({len(match[0])} characters)",
        text,
    )


def headline_of(error: BaseException) -> str:
    """Return "ValueError: its text", the first line of an error, without the notes added to it."""
    shown = traceback.TracebackException(type(error), error, None)
    shown.__notes__ = None
    return list(shown.format_exception_only())[-1].strip().splitlines()[0]
