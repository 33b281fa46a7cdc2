"""The checkpoints of hosts that share no disk: each keeps its ranks' files, and copies of others.

    [1] step-N.tmp/     on every disk
    [2] *.distcp        each rank writes its file on its own disk, as on a shared one
        copies          sent to `copies` more disks, written, and compared by their digests
    [3] consensus       after each of these: a failure on any rank is one on every rank
    [4] index.json      made by rank 0 and sent to every disk, with .metadata and manifest.json;
                        they list the files of all ranks, so any disk tells which are missing
    [5] step-N/         by rename, on every disk, after all have everything
    [6] to [8]          as on a shared disk, on every disk; all decide by the lists of all

A restore takes the newest step whose files are somewhere (`disk_contents`), and brings each disk
the files that its ranks read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from shoal.errors import CheckpointError, CleanupFailed
from shoal.platform.files import fsync_directory
from shoal.train.checkpoint import exact_json, manifest, tensor_files, tensor_index
from shoal.train.checkpoint.disk_contents import CheckpointPart, WholeCheckpoint, whole_checkpoints
from shoal.train.checkpoint.disk_messages import DiskMessages
from shoal.train.checkpoint.file_exchange import FileTransfer
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.checkpoint.manifest import Manifest, StoredFile, name_of, step_of
from shoal.train.checkpoint.rank_consensus import rank, world_size
from shoal.train.checkpoint.restored_files import RestoredFiles
from shoal.train.checkpoint.saved import Saved, load_tensors
from shoal.train.checkpoint.separate_retention import SeparateRetention
from shoal.train.checkpoint.store import Checkpoints, raise_for_defects, stored_files


class SeparateCheckpoints(Checkpoints):
    """The checkpoints of one run, in a directory that each host has on a disk of its own.

    Args:
        directory: of this rank; the ranks of one disk have the same.
        disks: which ranks share a disk; the same on all ranks.
        keep, group: as of `Checkpoints`.
    """

    def __init__(
        self,
        directory: Path,
        disks: HostDisks,
        keep: int = 3,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(directory, keep, group)
        self.disks = disks
        self._messages = DiskMessages(disks, self.consensus)
        self._own_retention = SeparateRetention(directory, keep)

    def in_directory(self, directory: Path) -> Checkpoints:
        return SeparateCheckpoints(directory, self.disks)

    def load(
        self,
        report: Callable[[str], None],
        step: int | None = None,
        which: Literal["latest", "best"] = "latest",
        like: tensor_files.LayoutLookup = tensor_files.no_layout,
    ) -> Saved | None:
        failed = f"no checkpoint was loaded from {self.directory}"
        restored = RestoredFiles(self.directory, self._messages)
        if step is None and which == "best":
            step = self._best_step(failed)
        chosen, skipped = restored.choose(failed, step)
        for sentence in skipped if rank() == 0 else []:
            report(sentence)
        if chosen is None:
            return None
        restored.spread_index(failed, chosen)
        restored.collect(failed, chosen, like)
        loaded: list[Saved] = []
        path = self.directory / chosen.name
        self.consensus.on_every_rank(
            failed, lambda: loaded.append(load_tensors(path, chosen.sha256, like))
        )
        return loaded[0]

    def complete(self, step: int, best: int | None) -> None:
        failed = f"not all was done that belongs to the save of step {step}"
        name, marked = name_of(step), None if best is None else name_of(best)
        try:
            are_clean = self._messages.on_disks(
                failed, lambda: self._retention.is_clean(name, marked)
            )
        except CheckpointError as error:
            raise CleanupFailed(str(error)) from error
        if not all(are_clean):
            self._follow_up(failed, name, marked)

    def make_whole_on_first_host(self) -> None:
        """Bring the newest and the best checkpoint to rank 0's disk, where it lacks a part.

        Collective.

        Raises:
            CheckpointError: on every rank; a file is nowhere, or could not be written.
        """
        failed = f"the checkpoints are not whole in {self.directory} of the first host"
        restored = RestoredFiles(self.directory, self._messages)
        newest, _ = restored.choose(failed)
        wanted = [] if newest is None else [newest]
        best = self._messages.on_disks(failed, lambda: self._own_retention.marked_best() or "")[0]
        if newest is not None and best not in ("", newest.name):
            marked, _ = restored.choose(failed, step_of(best))
            wanted += [] if marked is None else [marked]
        for chosen in wanted:
            restored.spread_index(failed, chosen)
            restored.collect_all(failed, chosen, disk=0)

    def _best_step(self, failed: str) -> int:
        """Return the step that the first disk with such a mark marks as the best. Collective."""
        marks = self._messages.on_disks(failed, lambda: self._own_retention.marked_best() or "")
        steps = [step for mark in marks if (step := step_of(mark)) is not None]
        if not steps:
            raise CheckpointError(f"{failed}:\n  no checkpoint is marked as the best one")
        return steps[0]

    def _begin(self, failed: str, step: int, info: Mapping[str, Any]) -> bool:
        text = self.consensus.on_rank_zero(failed, lambda: exact_json.to_text(info))
        whole = self._whole(failed)
        name = name_of(step)
        for one in whole:
            if (step_of(one.name) or 0) > step:
                raise CheckpointError(
                    f"{failed}:\n  {one.name} is there, good and newer: a later resume would go on "
                    "from that one. Move it away on all hosts, or use another run directory"
                )
            if one.name == name:
                self._check_same_info(failed, one, text)
                return False
        path = self.directory / name

        def make() -> None:
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._own_retention.forget(name)
            self._make_tmp_dir(path)

        self._messages.on_disks(failed, make)
        return True

    def _check_same_info(self, failed: str, there: WholeCheckpoint, text: str) -> None:
        """Raise CheckpointError on every rank if a checkpoint has another info. Collective."""
        path = self.directory / there.name

        def is_same() -> bool:
            own_disk = self.disks.of_rank[rank()]
            return own_disk not in there.disks or (
                exact_json.to_text(manifest.read(path).info) == text
            )

        if not all(self._messages.on_disks(failed, is_same)):
            raise CheckpointError(
                f"{failed}:\n  {there.name} is there, good, and has another info; it is not "
                "overwritten"
            )

    def _publish(
        self,
        failed: str,
        step: int,
        info: Mapping[str, Any],
        held: Sequence[tensor_index.HeldChunks],
        shares: Sequence[Mapping[str, Any]],
    ) -> None:
        tmp_path = self.directory / f"{name_of(step)}.tmp"
        files = stored_files(shares)
        self._send(failed, tmp_path, files, self._copies(shares))
        written = self.consensus.on_rank_zero(
            failed, lambda: self._write_index(tmp_path, held, shares)
        )
        small = {name: manifest.told_file(name, fields) for name, fields in written.items()}
        self._send(failed, tmp_path, small, self._to_all_disks(small))
        text = self.consensus.on_rank_zero(
            failed,
            lambda: Manifest(step, world_size(), small | files, info).text(),
        )
        self._messages.on_disks(failed, lambda: manifest.write_text(tmp_path, text))
        self._messages.on_disks(failed, lambda: self._rename(tmp_path))
        self._messages.on_disks(failed, lambda: self._own_retention.look(name_of(step)))
        if name_of(step) not in {one.name for one in self._whole(failed)}:
            raise CheckpointError(f"{failed}:\n  it was written, but not all files are there")

    def _copies(self, shares: Sequence[Mapping[str, Any]]) -> list[FileTransfer]:
        """Return who sends which rank's file to which other disk."""
        return [
            FileTransfer(name, source, self.disks.receiver(disk, source), stored[0])
            for source, share in enumerate(shares)
            for name, stored in share["files"].items()
            for disk in self.disks.holders(source)[1:]
        ]

    def _to_all_disks(self, files: Mapping[str, StoredFile]) -> list[FileTransfer]:
        """Return the transfers of files from rank 0 to all other disks."""
        return [
            FileTransfer(name, 0, self.disks.first_rank(disk), stored.size_bytes)
            for name, stored in files.items()
            for disk in range(1, self.disks.count)
        ]

    def _send(
        self,
        failed: str,
        tmp_path: Path,
        files: Mapping[str, StoredFile],
        transfers: Sequence[FileTransfer],
    ) -> None:
        """Send files of the save, and compare what has arrived. Collective."""
        self._messages.send(failed, transfers, tmp_path, tmp_path, files)

    def _write_index(
        self,
        tmp_path: Path,
        held: Sequence[tensor_index.HeldChunks],
        shares: Sequence[Mapping[str, Any]],
    ) -> dict[str, tuple[int, str, str]]:
        """Write the index on rank 0. Return size and digests of its files."""
        files = tensor_index.write(tmp_path, held, [share["chunks"] for share in shares])
        found = (manifest.defect(tmp_path, name, stored) for name, stored in files.items())
        raise_for_defects([line for line in found if line])
        return {
            name: (stored.size_bytes, stored.sha256, stored.blocks)
            for name, stored in files.items()
        }

    def _rename(self, tmp_path: Path) -> None:
        fsync_directory(tmp_path)
        os.rename(tmp_path, tmp_path.with_suffix(""))
        fsync_directory(self.directory)

    def _discard(self, tmp_path: Path) -> None:
        if self.disks.is_first(rank()):
            shutil.rmtree(tmp_path, ignore_errors=True)

    def _follow_up(self, failed: str, name: str, best: str | None) -> None:
        try:
            whole = self._whole(failed)
            self._messages.on_disks(failed, lambda: self._own_retention.clean_up(name, best, whole))
        except CheckpointError as error:
            raise CleanupFailed(str(error)) from error

    def _whole(self, failed: str) -> list[WholeCheckpoint]:
        """Return what is whole over all disks, each file read once in this run. Collective."""
        parts: list[list[CheckpointPart]] = self._messages.parts(failed, self._own_retention.parts)
        return whole_checkpoints(parts)
