"""Files that are on the disk when they are closed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from shoal.platform.files import atomic_write
from shoal.watchdog.progress_writer import own_progress


class HashedFile(io.FileIO):
    """A new file with a digest of its contents (XXH3-128), which must be written in order.

    It is fsynced when it is closed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb", opener=lambda path, flags: os.open(path, flags, 0o644))
        self.digest = xxhash.xxh3_128()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        own_progress().touch()
        written = super().write(data)
        self.digest.update(memoryview(data).cast("B")[:written])
        self.size_bytes += written
        return written

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


@contextmanager
def durable_stream(path: Path) -> Iterator[tuple[HashedFile, io.BufferedWriter[Any]]]:
    """Open `path` for writing. Yield the file, which has the digest, and a buffered stream.

    At the end the stream is flushed, fsynced and closed.
    """
    file = HashedFile(path)
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
