"""The checkpoint store: the protocol of a save, and loading. Steps [1] to [8]: see `__init__`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint import manifest, tensor_files, tensor_index
from shoal.checkpoint.manifest import Manifest, name_of, step_of
from shoal.checkpoint.rank_consensus import RankConsensus, rank, world_size
from shoal.checkpoint.search import (
    Retention,
    Which,
    checkpoint_at,
    newest_good,
    remove,
    saved_names,
)
from shoal.checkpoint.shard_format import RESERVED_NAME
from shoal.errors import CheckpointError, CleanupFailed, UsageError
from shoal.platform.files import fsync_directory

PRIVATE_NAME = re.compile(r"rank\d+/")


@dataclass(frozen=True)
class Saved:
    """A checkpoint in memory.

    Attributes:
        step: the step that it was saved as.
        tensors: by name, contiguous; full and on the CPU, or DTensors where `like` returned one.
        private: this rank's own tensors; empty if the world had another size at the save.
        info: the saved `info`; tuples have become lists.
        path: its directory.
    """

    step: int
    tensors: dict[str, Tensor]
    private: dict[str, Tensor]
    info: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class Division:
    """The tensors of a save, divided among ranks.

    Attributes:
        entries: what this rank holds by name, its private tensors included.
        share: names of those that this rank writes.
        held, shares: what each rank holds, and what each writes; empty on other ranks than 0.
    """

    step: int
    entries: Mapping[str, Tensor]
    share: Sequence[str]
    held: Sequence[tensor_index.HeldChunks]
    shares: Sequence[Sequence[str]]


class Checkpoints:
    """The checkpoints of one run, in a directory that all ranks can reach.

    Only one run at a time may save there.

    Args:
        directory: it is made at the first save.
        keep: number of the newest checkpoints that verify which are not pruned, at least 1. The
            best one is not pruned either.
        group: process group for the messages of saves; None for the default group.
    """

    def __init__(
        self, directory: Path, keep: int = 3, group: dist.ProcessGroup | None = None
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep={keep!r}: at least one checkpoint must stay, a whole number")
        self.directory = directory
        self.keep = keep
        self.consensus = RankConsensus(group)
        self._retention = Retention(directory, keep)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        info: Mapping[str, Any],
        private: Mapping[str, Tensor] | None = None,
        best: bool = False,
    ) -> Path:
        """Save a checkpoint. On return it is on the disk and was read back. Collective.

        A complete checkpoint of the same step with the same `info` stays as it is.

        Args:
            step: not negative, and above the step of every good checkpoint in the directory.
            tensors: by name, the same on every rank (DTensors: the same full tensor); of any shape,
                dtype, device and strides.
            info: JSON values; those of rank 0 are written. Floats stay exact, NaN and infinities
                too.
            private: tensors of this rank, such as the states of its random generators.
            best: mark it as the best one so far, so that it is not pruned.

        Returns: the checkpoint's directory.
        Raises:
            CheckpointError: on every rank, if it failed on any: the disk is full, other users can
                write the directory, a newer checkpoint exists. Earlier checkpoints are still there,
                and training can go on.
            CleanupFailed: on every rank. It is saved, and the next save does what remains.
            UsageError: on every rank, for a wrong `step`, `info` or name.
        """
        return self.write(self.divide(step, tensors, info, private), info, best)

    def divide(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        info: Mapping[str, Any],
        private: Mapping[str, Tensor] | None = None,
    ) -> Division:
        """Check the arguments of a save, and share its tensors out among ranks. Collective.

        Args: as of `save`.

        Raises: as `save`. Nothing is written.
        """
        told = self.consensus.all_gather_objects(misuse_of(step, tensors, info, private or {}))
        if problems := sorted({problem for problems in told for problem in problems}):
            raise UsageError("\n  ".join(["this cannot be saved:", *problems]))
        entries = dict(tensors)
        for name, tensor in (private or {}).items():
            entries[f"rank{rank()}/{name}"] = tensor
        failed = f"the checkpoint of step {step} was not saved in {self.directory}"
        held = self.consensus.gather(failed, lambda: tensor_index.held_chunks(entries))
        shares: list[list[str]] = []

        def share_out() -> list[list[str]]:
            shares.extend(tensor_index.shares(held))
            return shares

        share = self.consensus.scatter(failed, share_out)
        return Division(step, entries, share, held, shares)

    def write(self, division: Division, info: Mapping[str, Any], best: bool = False) -> Path:
        """Do [1] to [8]. Collective.

        Args: division: of this save; of its entries this rank needs its share only.

        Returns, raises: as `save`.
        """
        step = division.step
        path = self.directory / name_of(step)
        tmp_path = self.directory / f"{name_of(step)}.tmp"
        failed = f"the checkpoint of step {step} was not saved in {self.directory}"
        if self.consensus.on_rank_zero(failed, lambda: self._create_tmp_dir(step, info)):
            try:
                written = self.consensus.gather(
                    failed, lambda: _write_share(tmp_path, division.entries, division.share)
                )
                self.consensus.on_rank_zero(failed, lambda: self._publish(division, info, written))
            except CheckpointError:
                if rank() == 0:
                    shutil.rmtree(tmp_path, ignore_errors=True)
                raise
        failed = f"step {step} was saved, but not all that follows was done"
        marked = path.name if best else None
        self._try_to_clean_up(failed, lambda: self._retention.clean_up(path.name, marked))
        return path

    def complete(self, step: int, best: int | None) -> None:
        """Finish the cleanup of a save that was killed after [5]. Collective.

        Args:
            step: of the newest checkpoint that verifies.
            best: step of the best one so far, which is marked if it exists.

        Raises:
            CleanupFailed: on every rank; a hint could not be written, or a checkpoint not pruned.
        """
        name = name_of(step)
        marked = None if best is None else name_of(best)
        failed = f"not all was done that belongs to the save of step {step}"
        self._try_to_clean_up(failed, lambda: self._retention.clean_up(name, marked))

    def _try_to_clean_up(self, failed: str, action: Callable[[], None]) -> None:
        """Run `action` on rank 0. Collective. Raise CleanupFailed, which begins with `failed`."""
        try:
            self.consensus.on_rank_zero(failed, action)
        except CheckpointError as error:
            raise CleanupFailed(str(error)) from error

    def load(
        self,
        report: Callable[[str], None],
        which: Which = "latest",
        like: tensor_files.LayoutLookup = tensor_files.no_layout,
    ) -> Saved | None:
        """Load the newest checkpoint that verifies, or a certain one. Collective.

        Every file is compared with the manifest before any is used, each by one of the ranks.

        Args:
            report: called on rank 0 with a sentence for each checkpoint that was skipped.
            which: "best" for the one marked best and no other; or the step of one and no other.
            like: name -> a tensor in the layout of this run, or None. If it is a DTensor, this rank
                reads its own shard only.

        Returns: the same step on every rank; None if nothing was ever saved here, and `which` is
            "latest".
        Raises:
            CheckpointError: on every rank; there are checkpoints and none verifies, or the
                requested one is missing or corrupt, or other users can write the directory, or
                ranks see different files.
        """
        failed = f"no checkpoint was loaded from {self.directory}"
        spoiled: dict[str, list[str]] = {}
        while True:
            name, sha256, skipped = self.consensus.on_rank_zero(
                failed, lambda: self._choose(which, spoiled)
            )
            if name is None or not (problems := self._compare(failed, self.directory / name)):
                break
            spoiled[name] = problems
        for sentence in skipped if rank() == 0 else []:
            report(sentence)
        if name is None:
            return None
        loaded: list[Saved] = []
        self.consensus.on_every_rank(
            failed, lambda: loaded.append(_load_tensors(self.directory / name, sha256, like))
        )
        return loaded[0]

    def _compare(self, failed: str, path: Path) -> list[str]:
        """Return a line for each file of a checkpoint that was altered. Collective."""
        found = self.consensus.on_every_rank(
            failed, lambda: manifest.altered_files(path, rank(), world_size())
        )
        return [line for lines in found for line in lines]

    def choose(
        self, report: Callable[[str], None], which: Which = "latest"
    ) -> tuple[Path | None, int]:
        """Return directory and step of the checkpoint that `load` would load. For one process.

        Args:
            report: called with a sentence for each checkpoint that was skipped.

        Returns: (None, -1) if nothing was ever saved.
        Raises:
            CheckpointError: as `load`.
        """
        name, _, skipped = self._choose(which)
        for sentence in skipped:
            report(sentence)
        if name is None:
            return None, -1
        path = self.directory / name
        return path, manifest.read(path).step

    def _choose(
        self, which: Which, spoiled: Mapping[str, list[str]] | None = None
    ) -> tuple[str | None, str, list[str]]:
        """Return name, digest of the manifest, and sentences about skipped checkpoints.

        Args: spoiled: as in `newest_good`.
        """
        name: str | None
        skipped: list[str] = []
        if which == "latest":
            name, skipped = newest_good(self.directory, spoiled)
        else:
            name = checkpoint_at(self.directory, which, spoiled)
        sha256 = manifest.read(self.directory / name).sha256() if name else ""
        return name, sha256, skipped

    def _create_tmp_dir(self, step: int, info: Mapping[str, Any]) -> bool:
        """Do [1] on rank 0. Return False if the checkpoint exists already."""
        path = self.directory / name_of(step)
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name in saved_names(self.directory):
            if (step_of(name) or 0) > step and not self._retention.problems(name):
                raise CheckpointError(
                    f"{name} is there, good and newer: a later resume would go on from that one. "
                    "Move it away, or use another run directory"
                )
        if os.path.lexists(path) and not manifest.problems(path):
            if manifest.to_text(manifest.read(path).info) == manifest.to_text(info):
                return False
            raise CheckpointError(
                f"{path} is there, good, and has another info; it is not overwritten. Save once "
                "after a step: where a run goes on at the end of an epoch, `if step > resumed`. Or "
                "move it away"
            )
        remove(path)
        tmp_path = path.with_name(f"{path.name}.tmp")
        remove(tmp_path)
        tmp_path.mkdir(mode=0o755, exist_ok=True)  # `.nfs` files may have to stay
        return True

    def _publish(
        self, division: Division, info: Mapping[str, Any], written: Sequence[Sequence[Any]]
    ) -> None:
        """Do [4] to [6] on rank 0, and look at the checkpoint from there.

        Args: written: what each rank has written, as `tensor_files.write` returns it.
        """
        path = self.directory / name_of(division.step)
        tmp_path = path.with_name(f"{path.name}.tmp")
        files = dict(manifest.told_file(fields) for told in written for fields in told)
        index = tensor_index.write(tmp_path, division.held, division.shares)
        files[tensor_index.FILE_NAME] = index
        if defect := manifest.defect(tmp_path, tensor_index.FILE_NAME, index):
            _raise_for_defects([defect])
        manifest.write(tmp_path, Manifest(division.step, world_size(), files, info))
        fsync_directory(tmp_path)
        os.rename(tmp_path, path)
        fsync_directory(self.directory)
        _raise_for_defects(self._retention.verify(path.name, compare=False))


def _raise_for_defects(defects: Sequence[str]) -> None:
    if defects:
        reasons = ["it was written, but reading it back failed", *defects]
        raise CheckpointError("; ".join(reasons))


def _write_share(
    tmp_path: Path, entries: Mapping[str, Tensor], share: Sequence[str]
) -> list[tuple[str, int, str]]:
    """Do [2] on this rank."""
    if not tmp_path.is_dir():
        raise CheckpointError(
            f"{tmp_path} is not there; all ranks must reach the same directory, on a shared disk"
        )
    return tensor_files.write(tmp_path, entries, share)


def _load_tensors(path: Path, sha256: str, like: tensor_files.LayoutLookup) -> Saved:
    """Load this rank's tensors of a checkpoint that all ranks have verified."""
    contents = manifest.read(path)
    if contents.sha256() != sha256:
        raise CheckpointError(
            f"{path} is another one here than on rank 0; all ranks must reach the same directory"
        )
    prefix = f"rank{rank()}/"
    # In another world a rank has other samples, so that its random state has no meaning.
    same_world = contents.world == world_size()

    def is_wanted(name: str) -> bool:
        return not PRIVATE_NAME.match(name) or (same_world and name.startswith(prefix))

    tensors = tensor_files.read(path, is_wanted, like)
    private = {
        name.removeprefix(prefix): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(prefix)
    }
    return Saved(contents.step, tensors, private, dict(contents.info), path)


def misuse_of(
    step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
) -> list[str]:
    """Return a line for each argument of `save` that is wrong."""
    wrong = []
    if not isinstance(step, int) or step < 0:
        wrong.append(f"step must be a whole number from 0 on; it is {step!r}")
    wrong += info_problems(info, "info")
    entries = [*tensors.items(), *private.items()]
    wrong += [
        f"{name!r} is a {type(value).__name__}, no tensor"
        for name, value in entries
        if not isinstance(value, Tensor)
    ]
    wrong += [f"{name!r}: this name is reserved" for name, _ in entries if name == RESERVED_NAME]
    return wrong + [
        f"{name!r}: names of the form rankN/... are for `private`"
        for name in tensors
        if PRIVATE_NAME.match(name)
    ]


def info_problems(value: Any, where: str) -> list[str]:
    """Return a line for each part of `value` that would not be read back equal from JSON.

    Tuples are read as lists.

    Args:
        where: the path to `value`, with which each line begins.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return []
    if isinstance(value, list | tuple):
        return [
            problem
            for i, item in enumerate(value)
            for problem in info_problems(item, f"{where}[{i}]")
        ]
    if isinstance(value, Mapping):
        wrong = [
            f"{where}: the key {key!r} is no string" for key in value if not isinstance(key, str)
        ]
        return wrong + [
            problem
            for key, item in value.items()
            for problem in info_problems(item, f"{where}[{key!r}]")
        ]
    return [
        f"{where}: a {type(value).__name__} is no JSON value; tensors belong in `tensors`, the "
        "rest in plain types"
    ]
