"""The parts of checkpoints on each disk, and which step is whole over all disks together.

    step-9    disk 0: a, b     disk 1: -            c is nowhere: the save was interrupted
    step-6    disk 0: a, b     disk 1: c, a, b      whole, also without either disk's own a, b

Parts belong together only if their manifests are the same to the last bit, so that the parts of two
saves of one step never mix. All ranks decide alike, for all have the lists of all disks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError
from shoal.platform.ownership import untrusted_reason
from shoal.train.checkpoint import manifest
from shoal.train.checkpoint.search import saved_names


@dataclass(frozen=True)
class CheckpointPart:
    """One disk's part of a checkpoint.

    Attributes:
        name: of its directory, such as "step-00000012".
        sha256: digest of the manifest; empty if there is no good one.
        listed: names of the files of the whole checkpoint.
        held: those of them that are here.
        problem: a sentence if there is no good manifest.
    """

    name: str
    sha256: str = ""
    listed: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what is sent."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CheckpointPart:
        """Return the part that `to_json` described on another rank.

        Raises:
            CheckpointError: no checkpoint has such a name or such files. Their names become paths,
                and nothing that ranks send each other is authenticated.
        """
        name, sha256, problem = str(fields["name"]), str(fields["sha256"]), str(fields["problem"])
        listed, held = (tuple(map(str, fields[key])) for key in ("listed", "held"))
        if (
            manifest.step_of(name) is None
            or not manifest.DIGEST.fullmatch(sha256)
            or not all(manifest.LISTED_NAME.fullmatch(file) for file in (*listed, *held))
        ):
            raise CheckpointError(f"a rank tells of what is no checkpoint: {fields!s:.200}")
        return cls(name, sha256, listed, held, problem)


Parts = Sequence[Sequence[CheckpointPart]]
"""The parts on each disk, by its number."""


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint all of whose files are there, on one disk or on several.

    Attributes:
        holders: the disks that have a file, by its name.
        disks: the disks that have its manifest.
    """

    name: str
    sha256: str
    holders: Mapping[str, tuple[int, ...]]
    disks: tuple[int, ...]


def read_part(path: Path, compare: bool) -> CheckpointPart:
    """Return what is here of the checkpoint in `path`.

    Args: compare: False if only presence and sizes of files count.
    """
    try:
        if reason := untrusted_reason(path) or untrusted_reason(path / manifest.FILE_NAME):
            return CheckpointPart(path.name, problem=reason)
        contents = manifest.read(path)
        files = sorted(contents.files.items())
        held = [name for name, stored in files if not manifest.defect(path, name, stored, compare)]
    except (OSError, CheckpointError) as error:
        return CheckpointPart(path.name, problem=str(error))
    listed = tuple(name for name, _ in files)
    return CheckpointPart(path.name, contents.sha256(), listed, tuple(held))


def read_parts(directory: Path) -> list[CheckpointPart]:
    """Return what is here of all checkpoints, the newest first, by presence and sizes of files.

    Raises:
        CheckpointError: other users can write the directory.
    """
    return [read_part(directory / name, compare=False) for name in saved_names(directory)]


def whole_checkpoints(parts: Parts) -> list[WholeCheckpoint]:
    """Return the checkpoints that are whole over all disks, the newest first, one for each name.

    Of several whole ones with one name, that on the most disks comes; then that on the first disk.
    """
    found: dict[tuple[str, str], dict[int, CheckpointPart]] = {}
    for disk, on_disk in enumerate(parts):
        for part in on_disk:
            if part.sha256:
                found.setdefault((part.name, part.sha256), {})[disk] = part
    chosen: dict[str, WholeCheckpoint] = {}
    for (name, sha256), by_disk in found.items():
        listed = next(iter(by_disk.values())).listed
        holders = {
            file: tuple(disk for disk, part in by_disk.items() if file in part.held)
            for file in listed
        }
        if all(holders.values()):
            candidate = WholeCheckpoint(name, sha256, holders, tuple(by_disk))
            if name not in chosen or _order(candidate) < _order(chosen[name]):
                chosen[name] = candidate
    return sorted(chosen.values(), key=lambda one: -_step(one.name))


def skipped_sentences(parts: Parts, newest: WholeCheckpoint | None) -> list[str]:
    """Return a sentence for each checkpoint that is newer than `newest`, and not whole."""
    names = {part.name for on_disk in parts for part in on_disk}
    newer = [name for name in names if newest is None or _step(name) > _step(newest.name)]
    ordered = sorted(newer, key=_step, reverse=True)
    return [f"checkpoint {name} is skipped: {_defect(parts, name)}" for name in ordered]


def expired_names(
    names: Sequence[str], whole: Sequence[WholeCheckpoint], keep: int, best: str | None
) -> list[str]:
    """Return those of `names` that are older than the newest `keep` whole ones, without the best.

    Args: whole: as `whole_checkpoints` returns them.
    """
    if len(whole) < keep:
        return []
    oldest = _step(whole[keep - 1].name)
    return [name for name in names if _step(name) < oldest and name != best]


def _order(candidate: WholeCheckpoint) -> tuple[int, int, str]:
    return -len(candidate.disks), candidate.disks[0], candidate.sha256


def _step(name: str) -> int:
    step = manifest.step_of(name)
    assert step is not None
    return step


def _defect(parts: Parts, name: str) -> str:
    """Return why a checkpoint is not whole."""
    here = [part for on_disk in parts for part in on_disk if part.name == name]
    manifests = {part.sha256 for part in here if part.sha256}
    if not manifests:
        return "; ".join(part.problem for part in here)
    lines = []
    for sha256 in sorted(manifests):
        same = [part for part in here if part.sha256 == sha256]
        held = {file for part in same for file in part.held}
        absent = [file for file in same[0].listed if file not in held]
        lines.append(f"no host has a good {', '.join(absent)}")
    return "; ".join(lines)
