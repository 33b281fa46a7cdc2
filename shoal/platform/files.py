"""Atomic replacement of files: after a crash, and for each reader, a file is the old or the new
one.

NAME.tmp   written ── fsync ──> on the disk ── rename ──> NAME ── fsync of the directory
                      "file"                                      "rename"
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

Durability = Literal["process", "file", "rename"]
"""Failures that the new content survives after the write.

    process   the death of this process; a power failure may leave an empty file
    file      a power failure leaves the old file or the new one, never a part
    rename    a power failure leaves the new file
"""
BUFFER_BYTES = 1 << 20


@contextmanager
def atomic_write(
    path: Path, *, survives: Durability = "process", mode: int = 0o666, many_writers: bool = False
) -> Iterator[io.BufferedWriter[Any]]:
    """Open a stream whose content replaces `path` when the block ends without an exception.

    Before that, the content lies in `NAME.tmp` in the same directory. A killed process leaves this
    file, and the next write replaces it. Symbolic links at `path` and at `NAME.tmp` are replaced,
    not followed.

    Args:
        survives: the failures that the new content survives.
        mode: permissions of the new file, less the umask.
        many_writers: True where several processes may write `path` at once. The last to finish
            wins. Each writes to `.NAME.PID`, which remains if the process is killed.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(
        f".{path.name}.{os.getpid()}" if many_writers else f"{path.name}.tmp"
    )
    temporary.unlink(missing_ok=True)
    # O_EXCL: never follow a link that another user has put into the directory.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with io.BufferedWriter(io.FileIO(descriptor, "wb"), BUFFER_BYTES) as stream:
            yield stream
            stream.flush()
            if survives != "process":
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if survives == "rename":
        fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Let creations, renames and removals in the directory `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_directory(prefix: str, parent: str | None = None) -> Path:
    """Make a directory of this user's own, with a new name, where there is a place for it.

    The temporary directory may be full, or removed with all in it while a run trains.

    Args: parent: tried first; then the temporary directory, memory, and the working directory.

    Raises: OSError: there is none.
    """
    for place in (parent, None, "/dev/shm"):
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    return Path(tempfile.mkdtemp(prefix=prefix, dir=os.getcwd()))


def existing_directory(directory: str) -> Path:
    """Return `directory`, or the nearest directory above it that exists."""
    path = Path(directory).absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())
