"""The ranks that act for disks: their answers, and files that go from disk to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from shoal.errors import CheckpointError
from shoal.train.checkpoint import manifest
from shoal.train.checkpoint.disk_contents import CheckpointPart
from shoal.train.checkpoint.file_exchange import FileTransfer, exchange
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.checkpoint.manifest import StoredFile
from shoal.train.checkpoint.rank_consensus import RankConsensus, rank

T = TypeVar("T")


class DiskMessages:
    """Messages of the ranks that act for disks. All methods are collective over all ranks.

    Args:
        disks: which ranks share a disk.
        consensus: of all ranks.
    """

    def __init__(self, disks: HostDisks, consensus: RankConsensus) -> None:
        self.disks = disks
        self.consensus = consensus

    @property
    def own_disk(self) -> int:
        """The disk of this rank."""
        return self.disks.of_rank[rank()]

    def on_disks(self, failed: str, action: Callable[[], T]) -> list[T]:
        """Run `action` once for each disk, and return its results by disk, on every rank.

        Args:
            failed: the beginning of the error.
            action: returns a JSON value.

        Raises:
            CheckpointError: on every rank, if `action` raised on any.
        """
        is_first = self.disks.is_first(rank())
        results = self.consensus.on_every_rank(failed, lambda: action() if is_first else None)
        disks = range(self.disks.count)
        return [cast(T, results[self.disks.first_rank(disk)]) for disk in disks]

    def parts(
        self, failed: str, read: Callable[[], Sequence[CheckpointPart]]
    ) -> list[list[CheckpointPart]]:
        """Return what `read` finds on each disk."""
        found = self.on_disks(failed, lambda: [part.to_json() for part in read()])
        return [[CheckpointPart.from_json(fields) for fields in on_disk] for on_disk in found]

    def send(
        self,
        failed: str,
        transfers: Sequence[FileTransfer],
        read_from: Path,
        write_to: Path,
        files: Mapping[str, StoredFile],
    ) -> None:
        """Send files from rank to rank, and compare each with its digest where it has arrived.

        Args:
            transfers: the same on all ranks.
            read_from, write_to: directories of this rank.
            files: the listed sizes and digests, by name.

        Raises:
            CheckpointError: on every rank, if a file did not arrive as it is listed.
        """

        def exchange_and_compare() -> None:
            exchange(transfers, read_from, write_to, self.consensus.group)
            received = [one.name for one in transfers if one.target == rank()]
            found = (manifest.defect(write_to, name, files[name]) for name in received)
            if defects := [line for line in found if line]:
                raise CheckpointError("; ".join(["a file was sent and is damaged", *defects]))

        if transfers:
            self.consensus.on_every_rank(failed, exchange_and_compare)
