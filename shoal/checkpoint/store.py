"""The checkpoint store: the protocol of a save, and loading. Steps [1] to [8]: see `__init__`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint import manifest, tensor_files, tensor_index
from shoal.checkpoint.manifest import Manifest, name_of, step_of
from shoal.checkpoint.rank_consensus import RankConsensus, rank, world_size
from shoal.checkpoint.retention import Retention, remove
from shoal.checkpoint.save_arguments import misuse_of
from shoal.checkpoint.saved import Saved, load_tensors
from shoal.checkpoint.search import checkpoint_at, newest_good, saved_names
from shoal.errors import CheckpointError, CleanupFailed, UsageError
from shoal.platform.files import fsync_directory


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
        self._raise_for_misuse(misuse_of(step, tensors, info, private or {}))
        path = self.directory / name_of(step)
        tmp_path = self.directory / f"{name_of(step)}.tmp"
        failed = f"the checkpoint of step {step} was not saved in {self.directory}"
        if self.consensus.on_rank_zero(failed, lambda: self._create_tmp_dir(step, info)):
            entries = dict(tensors)
            for name, tensor in (private or {}).items():
                entries[f"rank{rank()}/{name}"] = tensor
            try:
                self._write(failed, step, entries, info)
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
        self._try_to_clean_up(
            failed,
            lambda: (
                None
                if self._retention.is_clean(name, marked)
                else self._retention.clean_up(name, marked)
            ),
        )

    def _try_to_clean_up(self, failed: str, action: Callable[[], None]) -> None:
        """Run `action` on rank 0. Collective. Raise CleanupFailed, which begins with `failed`."""
        try:
            self.consensus.on_rank_zero(failed, action)
        except CheckpointError as error:
            raise CleanupFailed(str(error)) from error

    def load(
        self,
        report: Callable[[str], None],
        step: int | None = None,
        which: Literal["latest", "best"] = "latest",
        like: tensor_files.LayoutLookup = tensor_files.no_layout,
    ) -> Saved | None:
        """Load the newest checkpoint that verifies, or a certain one. Collective.

        Every file is compared with the manifest before any is used, each by one of the ranks.

        Args:
            report: called on rank 0 with a sentence for each checkpoint that was skipped.
            step: load this one and no other.
            which: "best" for the one marked best and no other.
            like: name -> a tensor in the layout of this run, or None. If it is a DTensor, this rank
                reads its own shard only.

        Returns: the same step on every rank; None if nothing was ever saved here (never with `step`
            or `which="best"`).
        Raises:
            CheckpointError: on every rank; there are checkpoints and none verifies, or the
                requested one is missing or corrupt, or other users can write the directory, or
                ranks see different files.
        """
        failed = f"no checkpoint was loaded from {self.directory}"
        spoiled: dict[str, list[str]] = {}
        while True:
            name, sha256, skipped = self.consensus.on_rank_zero(
                failed, lambda: self._choose(step, which, spoiled)
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
            failed, lambda: loaded.append(load_tensors(self.directory / name, sha256, like))
        )
        return loaded[0]

    def _compare(self, failed: str, path: Path) -> list[str]:
        """Return a line for each file of a checkpoint that was altered. Collective."""
        found = self.consensus.on_every_rank(
            failed, lambda: manifest.altered_files(path, rank(), world_size())
        )
        return [line for lines in found for line in lines]

    def _raise_for_misuse(self, misuse: list[str]) -> None:
        """Raise UsageError on every rank, if there is misuse on any."""
        problems_of_ranks = self.consensus.all_gather_objects(misuse)
        problems = sorted({problem for problems in problems_of_ranks for problem in problems})
        if problems:
            raise UsageError("\n  ".join(["this cannot be saved:", *problems]))

    def choose(
        self, report: Callable[[str], None], which: Literal["latest", "best"] = "latest"
    ) -> tuple[Path | None, int]:
        """Return directory and step of the checkpoint that `load` would load. For one process.

        Args:
            report: called with a sentence for each checkpoint that was skipped.

        Returns: (None, -1) if nothing was ever saved.
        Raises:
            CheckpointError: as `load`.
        """
        name, _, skipped = self._choose(None, which)
        for sentence in skipped:
            report(sentence)
        if name is None:
            return None, -1
        path = self.directory / name
        return path, manifest.read(path).step

    def _choose(
        self, step: int | None, which: str, spoiled: Mapping[str, list[str]] | None = None
    ) -> tuple[str | None, str, list[str]]:
        """Return name, digest of the manifest, and sentences about skipped checkpoints.

        Args: spoiled: as in `newest_good`.
        """
        name: str | None
        skipped: list[str] = []
        if step is not None or which == "best":
            name = checkpoint_at(self.directory, step, spoiled)
        else:
            name, skipped = newest_good(self.directory, spoiled)
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
                f"{path} is there, good, and has another info; it is not overwritten"
            )
        remove(path)
        tmp_path = path.with_name(f"{path.name}.tmp")
        remove(tmp_path)
        tmp_path.mkdir(mode=0o755, exist_ok=True)  # `.nfs` files may have to stay
        return True

    def _write(
        self, failed: str, step: int, entries: Mapping[str, Tensor], info: Mapping[str, Any]
    ) -> None:
        """Do [2] to [6]. Collective.

        Args: entries: what this rank holds, its private tensors included.
        """
        tmp_path = self.directory / f"{name_of(step)}.tmp"

        def hold() -> dict[str, dict[str, Any]]:
            _check_tmp_directory(tmp_path)
            return tensor_index.held_chunks(entries)

        held = self.consensus.gather(failed, hold)
        shares: list[list[str]] = []

        def share_out() -> list[list[str]]:
            shares.extend(tensor_index.shares(held))
            return shares

        share = self.consensus.scatter(failed, share_out)
        written = self.consensus.gather(
            failed, lambda: tensor_files.write(tmp_path, entries, share)
        )

        self.consensus.on_rank_zero(
            failed, lambda: self._publish(step, info, held, shares, written)
        )

    def _publish(
        self,
        step: int,
        info: Mapping[str, Any],
        held: Sequence[tensor_index.HeldChunks],
        shares: Sequence[Sequence[str]],
        written: Sequence[Sequence[Any]],
    ) -> None:
        """Do [4] to [6] on rank 0, and look at the checkpoint from there.

        Args:
            held: what each rank holds, as `tensor_index.held_chunks` returns it.
            shares: what each rank was told to write, as `tensor_index.shares` returns it.
            written: what each rank has written, as `tensor_files.write` returns it.
        """
        path = self.directory / name_of(step)
        tmp_path = path.with_name(f"{path.name}.tmp")
        files = dict(manifest.told_file(fields) for told in written for fields in told)
        index = files[tensor_index.FILE_NAME] = tensor_index.write(tmp_path, held, shares)
        if defect := manifest.defect(tmp_path, tensor_index.FILE_NAME, index):
            _raise_for_defects([defect])
        manifest.write(tmp_path, Manifest(step, world_size(), files, info))
        fsync_directory(tmp_path)
        os.rename(tmp_path, path)
        fsync_directory(self.directory)
        _raise_for_defects(self._retention.verify(path.name, compare=False))


def _raise_for_defects(defects: Sequence[str]) -> None:
    if defects:
        reasons = ["it was written, but reading it back failed", *defects]
        raise CheckpointError("; ".join(reasons))


def _check_tmp_directory(tmp_path: Path) -> None:
    if not tmp_path.is_dir():
        raise CheckpointError(
            f"{tmp_path} is not there; all ranks must reach the same directory, on a shared disk"
        )
