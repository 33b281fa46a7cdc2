"""The checkpoint store: the protocol of saving, and the search for what can be loaded."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from shoal.errors import CheckpointError, CleanupFailed, UsageError
from shoal.platform.files import fsync_directory
from shoal.train.checkpoint import exact_json, manifest, tensor_files
from shoal.train.checkpoint.durable_io import replace_durably
from shoal.train.checkpoint.manifest import Manifest, StoredFile, name_of, step_of
from shoal.train.checkpoint.rank_consensus import RankConsensus, rank, world_size
from shoal.train.checkpoint.search import checkpoint_at, newest_good, pointed_at, saved_names

PRIVATE_NAME = re.compile(r"rank\d+/")
LEFTOVER_NAME = re.compile(r"(step-\d{8,}|latest|best)\.tmp")


@dataclass(frozen=True)
class Saved:
    """A checkpoint in memory.

    Attributes: step: the number that it was saved under. tensors: by name, contiguous; whole and on
        the CPU, or a DTensor where `like` gave one. private: this rank's own tensors; empty if the
        world has another size than when they were saved. info: what was saved as `info`; tuples
        have become lists. path: its directory.
    """

    step: int
    tensors: dict[str, Tensor]
    private: dict[str, Tensor]
    info: dict[str, Any]
    path: Path


class Checkpoints:
    """The checkpoints of one run, in one directory that all ranks can reach. One run at a time may
    save in it.

    Args: directory: made at the first save. keep: how many of the newest checkpoints that verify
        stay, at least 1; the best one stays as well. group: of all ranks, for what they have to say
        to each other here; None for the default group.
    """

    def __init__(
        self, directory: Path, keep: int = 3, group: dist.ProcessGroup | None = None
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one checkpoint must stay")
        self.directory = directory
        self.keep = keep
        self.votes = RankConsensus(group)
        self._known_problems: dict[str, list[str]] = {}
        self._unmarked: str | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        info: Mapping[str, Any],
        private: Mapping[str, Tensor] | None = None,
        best: bool = False,
    ) -> Path:
        """Save a checkpoint; when this returns it is on the disk and was read back. All ranks must
        call it.

        If this very step is there already, whole and with the same `info`, it stays as it is.

        Args: step: not negative, and above that of every good checkpoint in the directory. tensors:
            by name, the same on every rank (DTensors: the same whole); any shape, dtype, device,
            strides. info: JSON values; rank 0's are written. Floats come back exactly, NaN and
            infinities too. private: tensors of this rank alone, such as the states of its random
            generators. best: mark it as the best one so far, so that it is not pruned.

        Returns:
            The checkpoint's directory.

        Raises: CheckpointError: on every rank, if it failed on any: a full disk, a directory that
            others can write, a
                newer checkpoint in the way. What was saved before is still there; training can go
                on.
            TidyingFailed: on every rank; it is saved, and what remains to be done is done by the
            next save.
            UsageError: on every rank; `step`, `info` or a name is not what it should be.
        """
        self._refuse(_misuse(step, tensors, info, private or {}))
        path, aside = self.directory / name_of(step), self.directory / f"{name_of(step)}.tmp"
        failed = f"the checkpoint of step {step} was not saved in {self.directory}"
        if self.votes.on_rank_zero(failed, lambda: self._create_tmp_dir(step, path, aside, info)):
            entries = {
                **tensors,
                **{f"rank{rank()}/{name}": tensor for name, tensor in (private or {}).items()},
            }
            try:
                self.votes.on_every_rank(failed, lambda: _check_shared_directory(aside))
                shares = self.votes.on_every_rank(
                    failed, lambda: _as_json(tensor_files.write(aside, entries, self.votes.group))
                )
                files = {
                    name: StoredFile(*stored) for share in shares for name, stored in share.items()
                }
                contents = Manifest(step, world_size(), files, info)
                self.votes.on_rank_zero(failed, lambda: self._publish(aside, path, contents))
            except CheckpointError:
                if rank() == 0:
                    shutil.rmtree(aside, ignore_errors=True)
                raise
        failed = f"step {step} was saved, but not all that follows was done"
        self._follow_up(failed, lambda: self._cleanup(path.name, path.name if best else None))
        return path

    def complete(self, step: int, best: int | None) -> None:
        """Do what a save that was killed has left undone, once its checkpoint was there. All ranks
        must call it.

        Args:
            step: of the newest checkpoint that verifies.
            best: step of the best one so far, which is marked if it is there.

        Raises: TidyingFailed: on every rank; a hint could not be written, or what is superfluous
            not removed.
        """
        name, marked = name_of(step), None if best is None else name_of(best)
        failed = f"not all was done that belongs to the save of step {step}"
        self._follow_up(
            failed, lambda: None if self._is_tidy(name, marked) else self._cleanup(name, marked)
        )

    def _follow_up(self, failed: str, action: Callable[[], None]) -> None:
        """[7] and [8], by rank 0. Collective. Raises TidyingFailed, which begins with `failed`."""
        try:
            self.votes.on_rank_zero(failed, action)
        except CheckpointError as error:
            raise CleanupFailed(str(error)) from error

    def load(
        self,
        report: Callable[[str], None],
        step: int | None = None,
        which: Literal["latest", "best"] = "latest",
        like: tensor_files.LayoutLookup = tensor_files.no_layout,
    ) -> Saved | None:
        """Load the newest checkpoint that verifies, or the one asked for. All ranks must call it.

        Every file is compared with the manifest before torch opens any.

        Args: report: called on rank 0 with one sentence for each checkpoint that was skipped, and
            why. step: this one and no other. which: "best" for the one marked best and no other.
            like: name -> a tensor of today's layout; a rank reads its own shard of what is a
            DTensor there.

        Returns: The same step on every rank; None if nothing was ever saved here (not with `step`
            or `which="best"`).

        Raises: CheckpointError: on every rank; there are checkpoints and none verifies, or the one
            asked for is missing
                or corrupt, or the directory is not to be trusted, or ranks see different files.
        """
        failed = f"no checkpoint was loaded from {self.directory}"
        name, sha256, skipped = self.votes.on_rank_zero(failed, lambda: self._choose(step, which))
        for sentence in skipped if rank() == 0 else []:
            report(sentence)
        if name is None:
            return None
        loaded: list[Saved] = []
        self.votes.on_every_rank(
            failed, lambda: loaded.append(_load(self.directory / name, sha256, like))
        )
        return loaded[0]

    def _refuse(self, misuse: list[str]) -> None:
        """A UsageError on every rank, if there is misuse on any."""
        wrong = sorted(
            {problem for of_rank in self.votes.all_gather_objects(misuse) for problem in of_rank}
        )
        if wrong:
            raise UsageError("\n  ".join(["this cannot be saved:", *wrong]))

    def choose(
        self, report: Callable[[str], None], which: Literal["latest", "best"] = "latest"
    ) -> tuple[Path | None, int]:
        """The directory and the step of what `load` would load; None, and -1, if nothing was ever
        saved. One process.

        Args:
            report: called with one sentence for each checkpoint that was skipped, and why.

        Raises: CheckpointError: as `load`.
        """
        name, _, skipped = self._choose(None, which)
        for sentence in skipped:
            report(sentence)
        return (
            (None, -1)
            if name is None
            else (self.directory / name, manifest.read(self.directory / name).step)
        )

    def _choose(self, step: int | None, which: str) -> tuple[str | None, str, list[str]]:
        """The name to load, its manifest's digest, and sentences about what was skipped."""
        asked_for = step is not None or which == "best"
        name, sentences = (
            (checkpoint_at(self.directory, step), []) if asked_for else newest_good(self.directory)
        )
        return name, manifest.read(self.directory / name).sha256() if name else "", sentences

    def _create_tmp_dir(self, step: int, path: Path, aside: Path, info: Mapping[str, Any]) -> bool:
        """[1] An empty directory for the new files; False if the checkpoint is there already."""
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name in saved_names(self.directory):
            if (step_of(name) or 0) > step and not self._problems(name):
                raise CheckpointError(
                    f"{name} is there, good and newer: a later resume would go on from that one. "
                    "Move it away, or use another run directory"
                )
        if os.path.lexists(path) and not manifest.problems(path):
            if exact_json.to_text(manifest.read(path).info) == exact_json.to_text(info):
                return False
            raise CheckpointError(
                f"{path} is there, good, and has another info; it is not overwritten"
            )
        _remove(path)
        _remove(aside)
        aside.mkdir(mode=0o755)
        return True

    def _publish(self, aside: Path, path: Path, contents: Manifest) -> None:
        """[4] to [6]: from files to a checkpoint that was read back."""
        manifest.write(aside, contents)
        fsync_directory(aside)
        os.rename(aside, path)
        fsync_directory(self.directory)
        self._known_problems[path.name] = manifest.problems(path)
        if found := self._known_problems[path.name]:
            raise CheckpointError("; ".join(["it was written, but reading it back failed", *found]))

    def _cleanup(self, name: str, best: str | None) -> None:
        """The hints, then what is no longer needed. Where `best` cannot be written, the next
        call does it.
        """
        self._unmarked = best or self._unmarked
        replace_durably(self.directory / "latest", name + "\n")
        if self._unmarked in saved_names(self.directory):
            replace_durably(self.directory / "best", f"{self._unmarked}\n")
        self._unmarked = None
        for name in self._expired():
            _remove(self.directory / f"{name}.tmp")
            # A rename first: a kill in the middle leaves rubbish by its name, not a corrupt
            # checkpoint.
            os.rename(self.directory / name, self.directory / f"{name}.tmp")
        fsync_directory(self.directory)
        for entry in os.listdir(self.directory):
            if LEFTOVER_NAME.fullmatch(entry):
                _remove(self.directory / entry)

    def _is_tidy(self, name: str, best: str | None) -> bool:
        """Whether nothing is left to do after a save; opens no checkpoint."""
        marked = pointed_at(self.directory / "best")
        best_is_right = marked == best or best not in saved_names(self.directory)
        hints_are_right = (
            pointed_at(self.directory / "latest") == name
            and best_is_right
            and self._unmarked is None
        )
        left = [entry for entry in os.listdir(self.directory) if LEFTOVER_NAME.fullmatch(entry)]
        return (
            hints_are_right
            and not left
            and set(saved_names(self.directory)[self.keep :]) <= {marked}
        )

    def _expired(self) -> list[str]:
        """What is older than the newest `keep` that verify, and not the best."""
        best, good, old = pointed_at(self.directory / "best"), 0, []
        for name in saved_names(self.directory):
            if good == self.keep:
                old.append(name)
            elif not self._problems(name):
                good += 1
        return [name for name in old if name != best]

    def _problems(self, name: str) -> list[str]:
        """As `manifest.problems`, but each checkpoint is read only once in the life of this
        object.
        """
        if name not in self._known_problems:
            self._known_problems[name] = manifest.problems(self.directory / name)
        return self._known_problems[name]


def _check_shared_directory(aside: Path) -> None:
    if not aside.is_dir():
        raise CheckpointError(
            f"{aside} is not there; all ranks must reach the same directory, on a shared disk"
        )


def _load(path: Path, sha256: str, like: tensor_files.LayoutLookup) -> Saved:
    """This rank's part of a checkpoint that rank 0 has verified."""
    contents = manifest.read(path)
    if contents.sha256() != sha256:
        raise CheckpointError(
            f"{path} is another one here than on rank 0; all ranks must reach the same directory"
        )
    mine = f"rank{rank()}/"
    same_world = contents.world == world_size()
    wanted = lambda name: not PRIVATE_NAME.match(name) or (same_world and name.startswith(mine))  # noqa: E731
    everything = tensor_files.read(path, wanted, like)
    private = {
        name.removeprefix(mine): everything.pop(name)
        for name in list(everything)
        if name.startswith(mine)
    }
    return Saved(contents.step, everything, private, dict(contents.info), path)


def _as_json(written: Mapping[str, StoredFile]) -> dict[str, tuple[int, str]]:
    return {name: (stored.size_bytes, stored.sha256) for name, stored in written.items()}


def _misuse(
    step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
) -> list[str]:
    wrong = (
        []
        if isinstance(step, int) and step >= 0
        else [f"step must be a whole number from 0 on; it is {step!r}"]
    )
    wrong += exact_json.problems(info, "info")
    entries = [*tensors.items(), *private.items()]
    wrong += [
        f"{name!r} is a {type(value).__name__}, no tensor"
        for name, value in entries
        if not isinstance(value, Tensor)
    ]
    return wrong + [
        f"{name!r}: names of the form rankN/... are for `private`"
        for name in tensors
        if PRIVATE_NAME.match(name)
    ]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
