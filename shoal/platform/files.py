"""Files that are replaced as a whole: a reader, or a crash, sees the old one or the new one.

NAME.tmp   written ── fsync ──> on the disk ── rename ──> NAME ── fsync of the directory
                      "file"                                      "rename"
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Durability = Literal["process", "file", "rename"]
"""What the new content survives once it is written.

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

    The content lies in `NAME.tmp` in the same directory meanwhile, and the next write replaces what
    a killed one has left there. A symbolic link at `path` is replaced, not followed, and neither is
    one at `NAME.tmp`.

    Args:
        survives: what the new content is safe from afterwards.
        mode: permissions of the new file, less the umask.
        many_writers: whether several processes may write `path` at once; the last one to finish
            wins. Each then writes to `.NAME.PID`, which stays when it is killed.

    Raises:
        OSError: the file cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}" if many_writers else f"{path.name}.tmp")
    aside.unlink(missing_ok=True)
    # O_EXCL: where others may write to the directory, a link that they put there is not followed.
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with io.BufferedWriter(io.FileIO(descriptor, "wb"), BUFFER_BYTES) as stream:
            yield stream
            stream.flush()
            if survives != "process":
                os.fsync(descriptor)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if survives == "rename":
        fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in the directory `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
