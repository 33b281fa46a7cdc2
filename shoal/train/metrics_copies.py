"""Copies of metrics.jsonl on other hosts, where hosts share no disk.

rank 0's host   metrics.jsonl ── new lines, at each save ──> hosts that keep copies
a resume        the copy that goes furthest ──> rank 0's host, if its own is behind
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm.axis import check_lengths
from shoal.comm.mesh import Mesh
from shoal.platform.files import atomic_write
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.metrics_file import NAME, read_metrics


class MetricsCopies:
    """Keeps the metrics of a run on the hosts that keep copies of rank 0's files.

    A copy that cannot be read or written is left out: metrics never end a run.

    Args:
        directory: the run directory of this rank.
        disks: None if all hosts share it; then all methods do nothing.
    """

    def __init__(self, directory: Path, mesh: Mesh, disks: HostDisks | None) -> None:
        self._path = directory / NAME
        self._mesh = mesh
        self._disks = disks
        self._copied = b""  # what the copies have

    def restore(self, resume_step: int) -> None:
        """Bring the most complete metrics up to a step to rank 0's host. Collective.

        Call it before the file is opened there.
        """
        if self._disks is None:
            return
        first = self._disks.is_first(self._mesh.rank)
        own = min(_last_step(self._path), resume_step) if first else -1
        steps = [int(text) for text in self._mesh.all_gather_str(str(own))]
        source = steps.index(max(steps))
        if self._disks.of_rank[source] == 0:
            return
        contents = self._broadcast(self._contents_on(source), source)
        if self._mesh.rank == 0:
            _write(self._path, contents)

    def update(self) -> None:
        """Send the lines since the last call to the hosts that keep copies. Collective."""
        if self._disks is None:
            return
        contents = self._contents_on(0)
        # After a resume, or if the file was removed, copies begin anew.
        is_longer = bool(self._copied) and contents.startswith(self._copied)
        news = contents[len(self._copied) :] if is_longer else contents
        message = self._broadcast((b"+" if is_longer else b"=") + news, 0)
        self._copied = (self._copied if message[:1] == b"+" else b"") + message[1:]
        keepers = self._disks.holders(0)[1:]
        rank = self._mesh.rank
        if self._disks.is_first(rank) and self._disks.of_rank[rank] in keepers:
            _write(self._path, self._copied)

    def _contents_on(self, rank: int) -> bytes:
        """Return the file's bytes on `rank`, and nothing on other ranks."""
        if self._mesh.rank == rank:
            with contextlib.suppress(OSError):
                return self._path.read_bytes()
        return b""

    def _broadcast(self, contents: bytes, source: int) -> bytes:
        """Return the bytes of rank `source` on every rank. Collective."""
        length = torch.tensor([len(contents)], device=self._mesh.device)
        dist.broadcast(length, source)
        size_bytes = int(length)
        check_lengths([size_bytes])
        if size_bytes == 0:
            return b""
        data = torch.empty(size_bytes, dtype=torch.uint8, device=self._mesh.device)
        if self._mesh.rank == source:
            data.copy_(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
        dist.broadcast(data, source)
        return data.cpu().numpy().tobytes()


def _last_step(path: Path) -> int:
    try:
        records, _ = read_metrics(path)
    except OSError:
        return -1
    return max((record["step"] for record in records), default=-1)


def _write(path: Path, contents: bytes) -> None:
    with contextlib.suppress(OSError), atomic_write(path, survives="file", mode=0o644) as file:
        file.write(contents)
