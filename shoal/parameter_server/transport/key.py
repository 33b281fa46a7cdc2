"""The key of a job: 256 random bits in a file that only its owner can read. A process with the key
may push and pull.

    launcher ── new_key_file ──▶ server.key (0600) ── read_key ──▶ servers and workers
    secret of a job on several hosts ── derived_key ──▶ servers and workers of each host

The key is never in argv, in a log or in an error's text.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError

KEY_BYTES = 32
KEY_FILE = "server.key"


@dataclass(frozen=True)
class Key:
    """Proof that a process belongs to a job.

    Attributes:
        secret: 32 bytes; never printed.
    """

    secret: bytes = field(repr=False)


def derived_key(secret: bytes, job: str) -> Key:
    """Return the key of one job of servers, by HMAC-SHA256 of its name.

    Args: secret: that all ranks of a launch have; a launch may start servers several times.
    """
    return Key(hmac.digest(secret, f"servers of {job}".encode(), "sha256"))


def new_key_file(directory: Path, key: Key | None = None) -> Path:
    """Write a key to `directory`/server.key, readable by its owner only.

    Args: key: None for a new one.

    Raises:
        ConfigError: there is a key already, or it cannot be written.
    """
    path = directory / KEY_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            [f"{path}: there is a key already; delete it once no process of its job runs"]
        ) from None
    except OSError as error:
        raise ConfigError(
            [f"{path}: cannot write a key ({error.strerror}); give a directory of your own"]
        ) from error
    try:
        with open(descriptor, "wb", buffering=0) as file:
            file.write(secrets.token_bytes(KEY_BYTES) if key is None else key.secret)
    except BaseException:
        path.unlink()
        raise
    return path


def read_key(path: Path) -> Key:
    """Read the key of 32 bytes in `path`.

    Raises:
        ConfigError: there is no such file, others can read it, another user owns it, or it does
            not have 32 bytes.
    """
    try:
        # Without O_NONBLOCK, open would wait for the writer of a named pipe.
        with open(
            path, "rb", buffering=0, opener=lambda name, mode: os.open(name, mode | os.O_NONBLOCK)
        ) as file:
            problem = _problem(os.fstat(file.fileno()))
            key = b"" if problem else file.read(KEY_BYTES)
    except OSError as error:
        raise ConfigError(
            [f"{path}: cannot read the key ({error.strerror}); give the file that the job wrote"]
        ) from None
    if len(key) == KEY_BYTES:
        return Key(key)
    problem = problem or "shrank while it was read; read it again"
    raise ConfigError([f"{path}: {problem}"])


def _problem(status: os.stat_result) -> str | None:
    """Describe why a file must not be used as a key; None if it may be."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file; a key is a file of 32 bytes"
    if status.st_uid != os.geteuid():
        return (
            f"belongs to user {status.st_uid}, not to you ({os.geteuid()}); use a key that your "
            "own job wrote"
        )
    if mode & 0o077:
        return (
            f"others can open it (mode {mode:04o}), so the key is no secret; delete it and let the "
            "job write a new one"
        )
    if status.st_size != KEY_BYTES:
        return (
            f"holds {status.st_size} bytes where a key has {KEY_BYTES}; delete it and let the job "
            "write a new one"
        )
    return None
