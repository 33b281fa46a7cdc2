"""Files that are on the disk when they are closed, and checks that a path can be trusted."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from shoal.platform.files import atomic_write


class DurableFile(io.FileIO):
    """A new file that is fsynced when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb", opener=_open_for_owner)

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


class Digest(Protocol):
    """A digest of bytes that come in pieces."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class HashedFile(DurableFile):
    """A durable file with a digest of its contents, which must be written in order."""

    def __init__(self, path: Path, digest: Digest) -> None:
        super().__init__(path)
        self.digest = digest
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.digest.update(memoryview(data).cast("B")[:written])
        self.size_bytes += written
        return written


@contextmanager
def durable_stream(
    path: Path, digest: Digest | None = None
) -> Iterator[tuple[HashedFile, io.BufferedWriter[Any]]]:
    """Open `path` for writing. Yield the file, which has the digest, and a buffered stream.

    At the end the stream is flushed, fsynced and closed.

    Args: digest: SHA-256 by default.
    """
    file = HashedFile(path, hashlib.sha256() if digest is None else digest)
    with io.BufferedWriter(file, buffer_size=1 << 20) as stream:
        yield file, stream


def write_durably(path: Path, text: str) -> None:
    """Write a small file, and wait until it is on the disk."""
    with durable_stream(path) as (_, stream):
        stream.write(text.encode())


def replace_durably(path: Path, text: str) -> None:
    """Replace the text of `path` atomically: a reader sees the old or the new text."""
    with atomic_write(path, survives="rename", mode=0o644) as file:
        file.write(text.encode())


def untrusted_reason(path: Path) -> str | None:
    """Return why another user could have written this path, or None.

    torch stores the index of a checkpoint as a pickle, and a pickle can run code. A digest detects
    only accidents, because a user who can write the file can write the digest too.
    """
    status = path.lstat()
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link, and those are not followed here"
    if status.st_uid not in (user, 0):
        return (
            f"{path} belongs to user {status.st_uid}, and you are user {user}: loading it could "
            "run that user's code as you. If you trust it, make a copy of your own (cp -r)"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):03o}), who "
            f"could make you run their code. If you trust its contents: chmod -R go-w {path}"
        )
    return None


def _open_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o644)
