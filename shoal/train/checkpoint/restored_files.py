"""The files of a checkpoint that ranks read, brought to the disks where they are missing.

    choose         the newest step that is whole over all disks; every file here is compared
    spread_index   manifest.json and the index, to disks that lack them
    collect        the files that this disk's ranks read, from a disk that has them

A file arrives under another directory, step-N.tmp, is compared, and then moved into step-N.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.errors import CheckpointError
from shoal.platform.files import fsync_directory
from shoal.train.checkpoint import manifest, tensor_files, tensor_index
from shoal.train.checkpoint.disk_contents import (
    CheckpointPart,
    WholeCheckpoint,
    read_parts,
    skipped_sentences,
    whole_checkpoints,
)
from shoal.train.checkpoint.disk_messages import DiskMessages
from shoal.train.checkpoint.file_exchange import FileTransfer
from shoal.train.checkpoint.manifest import StoredFile, name_of, step_of
from shoal.train.checkpoint.rank_consensus import rank
from shoal.train.checkpoint.retention import remove
from shoal.train.checkpoint.saved import wanted_names

SMALL = (tensor_index.FILE_NAME, tensor_index.TORCH_FILE_NAME)
Spoiled = set[tuple[int, str, str]]  # disk, name of the checkpoint, name of the file


class RestoredFiles:
    """One restore from several disks. All public methods are collective.

    Args:
        directory: of the checkpoints on this rank's disk.
    """

    def __init__(self, directory: Path, messages: DiskMessages) -> None:
        self._directory = directory
        self._messages = messages
        self._spoiled: Spoiled = set()

    def choose(
        self, failed: str, step: int | None = None
    ) -> tuple[WholeCheckpoint | None, list[str]]:
        """Return the newest checkpoint that is whole over all disks, and what was skipped.

        Args:
            failed: the beginning of errors.
            step: choose this one and no other.

        Returns: (None, []) if no disk has any checkpoint; never with `step`.
        Raises:
            CheckpointError: on every rank; there are checkpoints and none is whole, or that of
                `step` is not.
        """
        self._messages.on_disks(failed, self._finish_rename)
        while True:
            found = self._messages.parts(failed, lambda: read_parts(self._directory))
            parts = _without(found, self._spoiled)
            whole = whole_checkpoints(parts)
            if step is not None:
                whole = [one for one in whole if one.name == name_of(step)]
            if not whole:
                break
            if not (spoiled := self._compare(failed, whole[0])):
                return whole[0], skipped_sentences(parts, whole[0]) if step is None else []
            self._spoiled |= spoiled
        if step is None and not any(parts):
            return None, []
        sentences = skipped_sentences(parts, None)
        if step is not None:
            sentences = [f"{name_of(step)} is not whole on these hosts", *sentences]
        cure = "none is left. Bring a host back that has the files, or use another run directory"
        raise CheckpointError("\n  ".join([f"{failed}:", *sentences, cure]))

    def spread_index(self, failed: str, chosen: WholeCheckpoint) -> None:
        """Bring manifest and index to every disk that lacks one of them."""
        source = chosen.disks[0]
        path = self._directory / chosen.name
        texts = self._messages.on_disks(
            failed,
            lambda: manifest.read(path).text() if self._messages.own_disk == source else "",
        )
        lacking = set(range(self._messages.disks.count)) - set(chosen.disks)
        self._messages.on_disks(
            failed,
            lambda: (
                self._begin_part(path, texts[source])
                if self._messages.own_disk in lacking
                else None
            ),
        )
        wanted = [
            [name for name in SMALL if name in chosen.holders and disk not in chosen.holders[name]]
            for disk in range(self._messages.disks.count)
        ]
        self._bring(failed, chosen, wanted)

    def collect(
        self, failed: str, chosen: WholeCheckpoint, like: tensor_files.LayoutLookup
    ) -> None:
        """Bring to every disk the files that its ranks read, after `spread_index`.

        Args: like: as of `Checkpoints.load`.
        """
        path = self._directory / chosen.name
        needs = self._messages.consensus.on_every_rank(
            failed, lambda: tensor_files.needed_files(path, wanted_names(path), like)
        )
        disks = self._messages.disks
        wanted = [
            sorted({name for one in disks.ranks(disk) for name in needs[one]})
            for disk in range(disks.count)
        ]
        self._bring(failed, chosen, [self._absent(chosen, *item) for item in enumerate(wanted)])

    def collect_all(self, failed: str, chosen: WholeCheckpoint, disk: int) -> None:
        """Bring all files to one disk, after `spread_index`."""
        wanted: list[list[str]] = [[] for _ in range(self._messages.disks.count)]
        wanted[disk] = self._absent(chosen, disk, sorted(set(chosen.holders) - set(SMALL)))
        self._bring(failed, chosen, wanted)

    def _absent(self, chosen: WholeCheckpoint, disk: int, names: Sequence[str]) -> list[str]:
        return [name for name in names if disk not in chosen.holders[name]]

    def _finish_rename(self) -> None:
        """Take up what was whole here when a kill came before the rename."""
        if not self._directory.is_dir():
            return
        for tmp_path in self._directory.glob("step-*.tmp"):
            path = tmp_path.with_suffix("")
            if step_of(path.name) is None or os.path.lexists(path):
                continue
            if (tmp_path / manifest.FILE_NAME).is_file():
                os.rename(tmp_path, path)
        fsync_directory(self._directory)

    def _compare(self, failed: str, chosen: WholeCheckpoint) -> Spoiled:
        """Compare all files of a checkpoint on all disks, and return those that were altered."""
        own = self._messages.own_disk
        ranks = self._messages.disks.ranks(own)
        held = {name for name, holders in chosen.holders.items() if own in holders}

        def altered() -> list[str]:
            path = self._directory / chosen.name
            return manifest.altered_names(path, held, ranks.index(rank()), len(ranks))

        found = self._messages.consensus.on_every_rank(failed, altered)
        return {
            (self._messages.disks.of_rank[source], chosen.name, name)
            for source, names in enumerate(found)
            for name in names
        }

    def _begin_part(self, path: Path, text: str) -> None:
        """Make the directory of a checkpoint of which this disk has nothing yet."""
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        tmp_path = path.with_name(f"{path.name}.tmp")
        remove(tmp_path)
        tmp_path.mkdir(mode=0o755, exist_ok=True)
        manifest.write_text(tmp_path, text)
        remove(path)  # of another save, or damaged
        os.rename(tmp_path, path)
        fsync_directory(self._directory)

    def _bring(self, failed: str, chosen: WholeCheckpoint, wanted: Sequence[Sequence[str]]) -> None:
        """Bring files to disks, and move them into the checkpoint there.

        Args: wanted: names by disk, none of which are there in a good state.
        """
        if not any(wanted):
            return
        disks = self._messages.disks
        path = self._directory / chosen.name
        tmp_path = path.with_name(f"{path.name}.tmp")
        listed: dict[str, StoredFile] = {}

        def make() -> list[int]:
            listed.update(manifest.read(path).files)
            if disks.is_first(rank()) and wanted[self._messages.own_disk]:
                remove(tmp_path)
                tmp_path.mkdir(mode=0o755, exist_ok=True)
            return []

        self._messages.consensus.on_every_rank(failed, make)
        transfers = []
        for disk, names in enumerate(wanted):
            for index, name in enumerate(names):
                # Disks that have a copy take turns, and so do their ranks.
                holders = chosen.holders[name]
                source = disks.receiver(holders[(disk + index) % len(holders)], index)
                target = disks.receiver(disk, index)
                transfers.append(FileTransfer(name, source, target, listed[name].size_bytes))
        self._messages.send(failed, transfers, path, tmp_path, listed)
        self._messages.on_disks(
            failed, lambda: _move(wanted[self._messages.own_disk], tmp_path, path)
        )


def _move(names: Sequence[str], tmp_path: Path, path: Path) -> None:
    if not names:
        return
    for name in names:
        os.replace(tmp_path / name, path / name)
    fsync_directory(path)
    remove(tmp_path)


def _without(
    parts: Sequence[Sequence[CheckpointPart]], spoiled: Spoiled
) -> list[list[CheckpointPart]]:
    """Return parts as if spoiled files were not there."""
    return [
        [
            replace(
                part,
                held=tuple(file for file in part.held if (disk, part.name, file) not in spoiled),
            )
            for part in on_disk
        ]
        for disk, on_disk in enumerate(parts)
    ]
