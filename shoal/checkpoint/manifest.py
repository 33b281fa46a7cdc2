"""The manifest of a checkpoint: the list of its files, by which it is verified.

`manifest.json` is written last. It lists every other file with its size and digest, and has the
SHA-256 of its own contents. A directory without it is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from shoal.checkpoint.durable_io import write_durably
from shoal.errors import CheckpointError
from shoal.platform.ownership import read_text_of_file, untrusted_reason

FILE_NAME = "manifest.json"
FORMAT = 3
MAX_BYTES = 1 << 26  # of a manifest; one of 4,096 ranks has some 2 MiB
READERS = 4  # threads that compare files
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
LISTED_NAME = re.compile(r"rank-\d{5,}\.safetensors|index\.json")
DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredFile:
    """Size and digest of one file of a checkpoint.

    Attributes:
        digest: XXH3-128, 32 hexadecimal digits. It finds accidents and no attacks: who can write
            the files of a checkpoint can write its manifest too.
    """

    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        world: number of ranks that have saved the checkpoint.
        files: all other files of the checkpoint, by name.
    """

    step: int
    world: int
    files: Mapping[str, StoredFile]
    info: Mapping[str, Any]

    def contents(self) -> dict[str, Any]:
        """Return what is written, as JSON values."""
        files = {name: asdict(stored) for name, stored in self.files.items()}
        return {
            "format": FORMAT,
            "step": self.step,
            "world": self.world,
            "files": files,
            "info": self.info,
        }

    def sha256(self) -> str:
        """Return the digest of the contents, equal for equal checkpoints."""
        return hashlib.sha256(to_text(self.contents()).encode()).hexdigest()


def to_text(value: Any) -> str:
    """Return JSON of a value, from which `json.loads` makes an equal one: floats are exact.

    NaN and infinities are written as JavaScript's names. Equal values with keys in the same order
    have equal texts.
    """
    return json.dumps(value, indent=1)


def step_of(name: str) -> int | None:
    """Return 12 for "step-00000012"; None for a name that no checkpoint has."""
    match = CHECKPOINT_NAME.fullmatch(name)
    # "step-000000012" matches too, but would be a second name of step 12.
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def name_of(step: int) -> str:
    """Return "step-00000012" for 12."""
    return f"step-{step:08d}"


def told_file(fields: object) -> tuple[str, StoredFile]:
    """Return a file as another rank has told it: a list of name, size and digest.

    A rank's words travel over Gloo, where nothing is authenticated: a name could lead elsewhere.

    Raises:
        CheckpointError: no checkpoint has such a file.
    """
    match fields:
        case [str(name), int(size_bytes), str(digest)] if (
            LISTED_NAME.fullmatch(name) and size_bytes >= 0 and DIGEST.fullmatch(digest)
        ):
            return name, StoredFile(size_bytes, digest)
    raise CheckpointError(f"a rank tells of a file that no checkpoint contains: {fields!r:.100}")


def write(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` and wait until it is on the disk."""
    text = to_text({"contents": manifest.contents(), "sha256": manifest.sha256()})
    write_durably(directory / FILE_NAME, text + "\n")


def read(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint. No other file in the directory is opened.

    Raises:
        CheckpointError: it is missing, unreadable, altered, of another format, or of another step
            than its directory.
    """
    path = directory / FILE_NAME
    try:
        document = json.loads(read_text_of_file(path, MAX_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is unreadable ({error})") from None
    return _parsed(document, path)


def problems(directory: Path, compare: bool = True) -> list[str]:
    """Return a line for each problem of a checkpoint; none if it is complete. Reads all of it.

    Args: compare: False if the contents of all files were compared a moment ago: then only their
        presence and sizes count.
    """
    try:
        if reason := untrusted_reason(directory):
            return [reason]
        listed = read(directory).files
        # NFS keeps a removed file that is still open, under such a name.
        present = {name for name in os.listdir(directory) if not name.startswith(".nfs")}
        unlisted = sorted(present - set(listed) - {FILE_NAME})
        return [
            *(f"{directory / name} is not in the manifest" for name in unlisted),
            *_defects(directory, listed, compare),
        ]
    except (OSError, CheckpointError) as error:
        return [str(error)]


def altered_files(directory: Path, index: int, count: int) -> list[str]:
    """Return a line for each file that is not the listed one, of part `index` of `count`.

    Each rank compares a part, some as many files of each size, so that all are compared.
    """
    files = read(directory).files
    names = sorted(files, key=lambda name: (-files[name].size_bytes, name))[index::count]
    return _defects(directory, {name: files[name] for name in names}, compare=True)


def _parsed(document: Any, path: Path) -> Manifest:
    try:
        contents, sha256 = document["contents"], document["sha256"]
        if (version := contents["format"]) != FORMAT:
            raise CheckpointError(
                f"{path} has format {version!r}; this version of Shoal reads format {FORMAT}"
            )
        files = {name: StoredFile(**entry) for name, entry in contents["files"].items()}
        manifest = Manifest(contents["step"], contents["world"], files, contents["info"])
        actual = manifest.sha256()
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no manifest ({type(error).__name__}: {error})") from None
    if actual != sha256:
        raise CheckpointError(f"{path} was altered: its SHA-256 should be {sha256} and is {actual}")
    if manifest.step != step_of(path.parent.name):
        raise CheckpointError(
            f"{path} is of step {manifest.step}, which is not what its directory is called"
        )
    return manifest


def _defects(directory: Path, listed: Mapping[str, StoredFile], compare: bool) -> list[str]:
    if reason := untrusted_reason(directory / FILE_NAME):
        return [reason]
    # In threads: digests are computed, and files read, beside each other.
    with ThreadPoolExecutor(max_workers=READERS) as readers:
        found = readers.map(
            lambda item: defect(directory, item[0], item[1], compare), sorted(listed.items())
        )
        return [line for line in found if line]


def defect(directory: Path, name: str, stored: StoredFile, compare: bool = True) -> str | None:
    """Return why one file is not the listed one; None if it is. Cheap checks come first."""
    path = directory / name
    if not LISTED_NAME.fullmatch(name):
        return f"{directory / FILE_NAME} lists {name!r}, which no checkpoint contains"
    try:
        status = path.lstat()
    except FileNotFoundError:
        return f"{path} is missing"
    if reason := untrusted_reason(path):
        return reason
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is no regular file"
    if status.st_size != stored.size_bytes:
        return f"{path} should have {stored.size_bytes} bytes and has {status.st_size}"
    if not compare:
        return None
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    if actual != stored.digest:
        return f"{path} was altered: digest {stored.digest} expected, {actual} found"
    return None
