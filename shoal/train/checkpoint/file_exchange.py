"""Files that ranks send each other, as plain bytes.

    rank 0   __0_0.distcp ── pieces ──> rank 1   compares the digest that the manifest lists
    rank 1   __1_0.distcp ── pieces ──> rank 2   ...

All ranks have the same plan. Messages of two ranks have the order of the plan, so that nothing but
bytes is sent. A rank that cannot read or write goes on with the messages, and tells at the end.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.platform.ownership import open_own
from shoal.train.checkpoint.manifest import LISTED_NAME
from shoal.train.checkpoint.rank_consensus import rank

BUFFER_BYTES = 32 << 20  # for all messages of one rank that are under way
LEAST_PIECE_BYTES = 64 << 10


@dataclass(frozen=True)
class FileTransfer:
    """A file on its way from one rank to another.

    Args:
        name: of the file, without its directory.
        source, target: ranks of the default group.
        size_bytes: its size, which the manifest lists.

    Raises:
        CheckpointError: no file of a checkpoint has such a name. Names come from other ranks, and
            a received file is written before it is compared.
    """

    name: str
    source: int
    target: int
    size_bytes: int

    def __post_init__(self) -> None:
        if not LISTED_NAME.fullmatch(self.name) or self.size_bytes < 0:
            raise CheckpointError(f"{self.name!r:.100} is no file of a checkpoint, and is not sent")


def exchange(
    transfers: Sequence[FileTransfer],
    read_from: Path,
    write_to: Path,
    group: dist.ProcessGroup | None,
) -> None:
    """Send and receive the files of a plan. Collective, with the same plan on all ranks.

    Received files are new, and on the disk on return; their contents are not compared here.

    Args:
        read_from: this rank's directory of the files that it sends.
        write_to: an existing directory for those that it receives.
        group: of all ranks; None for the default group.

    Raises:
        OSError: on this rank alone, after all messages: a file could not be read or written.
    """
    counts = Counter(end for one in transfers for end in (one.source, one.target))
    if rank() not in counts:
        return
    piece_bytes = max(LEAST_PIECE_BYTES, BUFFER_BYTES // max(counts.values()))
    with ExitStack() as stack:
        ends: list[_Sending | _Receiving] = []
        for one in transfers:
            if one.source == rank():
                ends.append(_Sending(one, read_from, group, stack))
            elif one.target == rank():
                ends.append(_Receiving(one, write_to, group, stack))
        longest = max(end.size_bytes for end in ends)
        for position in range(0, longest, piece_bytes):
            # All messages are under way before one is waited for: no ring of ranks can block.
            waits = [
                end.start(min(piece_bytes, end.size_bytes - position))
                for end in ends
                if position < end.size_bytes
            ]
            for wait in waits:
                wait()
        for end in ends:
            end.finish()
    for end in ends:
        if end.problem is not None:
            raise end.problem


class _End:
    """One end of a transfer: a file, and the first problem with it."""

    def __init__(self, one: FileTransfer) -> None:
        self.size_bytes = one.size_bytes
        self.problem: OSError | None = None
        self.file: io.FileIO | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Run `action` on the file, unless there was a problem before."""
        if self.problem is None:
            try:
                action()
            except OSError as error:
                self.problem = error


class _Sending(_End):
    def __init__(
        self, one: FileTransfer, directory: Path, group: dist.ProcessGroup | None, stack: ExitStack
    ) -> None:
        super().__init__(one)
        self._target, self._group = one.target, group

        def open_file() -> None:
            descriptor = open_own(directory / one.name, os.O_RDONLY)
            self.file = stack.enter_context(io.FileIO(descriptor, "rb"))

        self.attempt(open_file)

    def start(self, size_bytes: int) -> Callable[[], None]:
        piece = bytearray(size_bytes)

        def read() -> None:
            assert self.file
            view, done = memoryview(piece), 0
            while done < size_bytes and (count := self.file.readinto(view[done:])):
                done += count

        self.attempt(read)
        work = dist.isend(torch.frombuffer(piece, dtype=torch.uint8), self._target, self._group)
        return lambda: _wait(work)

    def finish(self) -> None:
        pass


class _Receiving(_End):
    def __init__(
        self, one: FileTransfer, directory: Path, group: dist.ProcessGroup | None, stack: ExitStack
    ) -> None:
        super().__init__(one)
        self._source, self._group = one.source, group

        def open_file() -> None:
            self.file = stack.enter_context(io.FileIO(directory / one.name, "xb"))

        self.attempt(open_file)

    def start(self, size_bytes: int) -> Callable[[], None]:
        piece = torch.empty(size_bytes, dtype=torch.uint8)
        work = dist.irecv(piece, self._source, self._group)

        def complete() -> None:
            _wait(work)
            self.attempt(lambda: self._write(piece))

        return complete

    def finish(self) -> None:
        def to_disk() -> None:
            assert self.file
            os.fsync(self.file.fileno())

        self.attempt(to_disk)

    def _write(self, piece: Tensor) -> None:
        assert self.file
        view, done = piece.numpy().data, 0
        while done < len(view):
            done += self.file.write(view[done:])


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
