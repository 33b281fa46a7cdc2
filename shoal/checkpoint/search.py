"""The checkpoints of a directory: find the newest that verifies, the best, or one by its step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.checkpoint import manifest
from shoal.checkpoint.manifest import name_of, step_of
from shoal.errors import CheckpointError
from shoal.platform.ownership import read_text_of_file, untrusted_reason

MAX_HINT_BYTES = 100

Which = Literal["latest", "best"] | int
"""A checkpoint of a run: the newest, the best, or that of a step."""


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint that verifies; None if nothing was saved. For one process.

    Raises:
        CheckpointError: there are checkpoints and none verifies, or other users can write the
            directory.
    """
    name, _ = newest_good(directory)
    return directory / name if name else None


def read_info(path: Path) -> dict[str, Any]:
    """Return the `info` that a checkpoint was saved with. Reads only the manifest.

    Raises:
        CheckpointError: the manifest is missing, unreadable or altered.
    """
    return dict(manifest.read(path).info)


def saved_names(directory: Path) -> list[str]:
    """Return names of checkpoints, complete or not, the newest first."""
    if not directory.exists():
        return []
    if reason := untrusted_reason(directory.resolve()):
        raise CheckpointError(reason)
    steps = [step for name in os.listdir(directory) if (step := step_of(name)) is not None]
    return [name_of(step) for step in sorted(steps, reverse=True)]


def pointed_at(hint: Path) -> str | None:
    """Return the name in a hint file (`latest`, `best`); None if it is missing or damaged."""
    try:
        name = read_text_of_file(hint, MAX_HINT_BYTES).strip()
    except (OSError, ValueError):
        return None
    return name if step_of(name) is not None else None


def newest_good(
    directory: Path, spoiled: Mapping[str, list[str]] | None = None
) -> tuple[str | None, list[str]]:
    """Return the newest checkpoint that verifies, and a sentence for each one that was skipped.

    Args: spoiled: problems by the name of a checkpoint. If given, all others are compared later:
        now only presence and sizes of their files count.
    """
    names = saved_names(directory)
    sentences = _problems_of_hint(directory / "latest", names)
    for name in names:
        if not (problems := _problems(directory, name, spoiled)):
            return name, sentences
        sentences.append(f"checkpoint {name} is skipped: {'; '.join(problems)}")
    if names:
        cure = "none is left. Restore one, or move them away if the run shall start afresh"
        raise CheckpointError("\n  ".join([*sentences, cure]))
    return None, sentences


def checkpoint_at(
    directory: Path, which: Which, spoiled: Mapping[str, list[str]] | None = None
) -> str:
    """Return the name of the best checkpoint, or of that of a step; not of the latest one.

    Args: spoiled: as in `newest_good`.

    Raises:
        CheckpointError: it does not exist or does not verify.
    """
    name = name_of(which) if isinstance(which, int) else pointed_at(directory / "best")
    names = saved_names(directory)
    if name is None:
        raise CheckpointError("no checkpoint is marked as the best one")
    if name not in names:
        raise CheckpointError(f"{name} is not there; there are: {', '.join(names) or 'none'}")
    if problems := _problems(directory, name, spoiled):
        raise CheckpointError("\n  ".join([f"{name} is not whole:", *problems]))
    return name


def _problems(directory: Path, name: str, spoiled: Mapping[str, list[str]] | None) -> list[str]:
    if spoiled is not None and name in spoiled:
        return spoiled[name]
    return manifest.problems(directory / name, compare=spoiled is None)


def _problems_of_hint(latest: Path, names: list[str]) -> list[str]:
    if not os.path.lexists(latest):
        return []
    name = pointed_at(latest)
    if name in names:
        return []
    return [
        f"{latest} names {name}, which is not there" if name else f"{latest} names no checkpoint"
    ]
