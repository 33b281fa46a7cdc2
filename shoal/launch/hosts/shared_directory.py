"""A test whether hosts see one file system, by a file that one of them writes.

Device numbers and mount tables prove nothing: two machines may have the same ones, and one file
system may be mounted from two servers.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from shoal.platform.ownership import read_text_of_file

LOOK_S = 2.0
"""Seconds for which a host looks for the file of another; network file systems may be late."""
PAUSE_S = 0.1
NAME_BYTES = 8

PROBE_PREFIX = ".shoal-probe-"
"""Beginning of the name of a file that is there for a moment."""


def existing_directory(directory: str) -> Path:
    """Return `directory`, or the nearest directory above it that exists."""
    path = Path(directory).absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def write_probe(directory: str, nonce: str) -> Path | None:
    """Write a file with the nonce where `directory` is, or would be made. The first host calls it.

    Its name does not tell the nonce, which nobody else can read: a user who sees the name here
    could otherwise make the same file on another host.

    Args:
        nonce: letters and digits that no other run has.

    Returns:
        The file, which the caller must remove with `remove_probe`; None where nothing can be
        written there.
    """
    probe = existing_directory(directory) / f"{PROBE_PREFIX}{secrets.token_hex(NAME_BYTES)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(probe, flags, 0o600), "w") as file:
            file.write(nonce)
            file.flush()
            os.fsync(file.fileno())  # a client of NFS keeps it to itself before
    except OSError:
        with suppress(OSError):  # the disk may be full, and the file be there
            probe.unlink()
        return None
    return probe


def sees_probe(probe: str, nonce: str, timeout_s: float = LOOK_S) -> bool:
    """Return True if the file that another host wrote is here as well. All other hosts call it."""
    end_s = time.monotonic() + timeout_s
    while True:
        with suppress(OSError, UnicodeDecodeError):
            if read_text_of_file(Path(probe), len(nonce)) == nonce:
                return True
        if time.monotonic() >= end_s:
            return False
        time.sleep(PAUSE_S)


def remove_probe(probe: Path) -> None:
    """Remove the file of `write_probe`. It may be gone already."""
    with suppress(OSError):
        probe.unlink()
