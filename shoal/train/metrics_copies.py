"""Copies of metrics.jsonl on other hosts, where hosts share no disk.

rank 0's host   metrics.jsonl ── new lines, at each save ──> hosts that keep copies
a resume        the copy that goes furthest ──> rank 0's host, if its own is behind
"""

from __future__ import annotations

import contextlib
from pathlib import Path

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
        self._text = ""  # what the copies have

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
        texts = self._mesh.all_gather_str(_text_of(self._path) if self._mesh.rank == source else "")
        if self._mesh.rank == 0:
            _write(self._path, texts[source])

    def update(self) -> None:
        """Send the lines since the last call to the hosts that keep copies. Collective."""
        if self._disks is None:
            return
        text = _text_of(self._path) if self._mesh.rank == 0 else ""
        # After a resume, or if the file was removed, copies begin anew.
        is_longer = bool(self._text) and text.startswith(self._text)
        news = text[len(self._text) :] if is_longer else text
        message = self._mesh.broadcast_str(f"{'+' if is_longer else '='}{news}")
        self._text = (self._text if message[0] == "+" else "") + message[1:]
        keepers = self._disks.holders(0)[1:]
        rank = self._mesh.rank
        if self._disks.is_first(rank) and self._disks.of_rank[rank] in keepers:
            _write(self._path, self._text)


def _last_step(path: Path) -> int:
    try:
        records, _ = read_metrics(path)
    except OSError:
        return -1
    return max((record["step"] for record in records), default=-1)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError), atomic_write(path, survives="file", mode=0o644) as file:
        file.write(text.encode())
