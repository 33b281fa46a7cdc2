"""Which checkpoints there are in a directory, and which of them can be loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError
from shoal.train.checkpoint import manifest
from shoal.train.checkpoint.durable_io import untrusted_reason
from shoal.train.checkpoint.manifest import name_of, step_of


def newest(directory: Path) -> Path | None:
    """The newest checkpoint that verifies, or None if nothing was ever saved in `directory`. For
    one process.

    Raises: CheckpointError: there are checkpoints and none verifies, or the directory is not to be
        trusted.
    """
    name, _ = newest_good(directory)
    return directory / name if name else None


def read_info(path: Path) -> dict[str, Any]:
    """The `info` that a checkpoint was saved with; reads the manifest and nothing else.

    Raises:
        CheckpointError: the manifest is missing, unreadable or altered.
    """
    return dict(manifest.read(path).info)


def saved_names(directory: Path) -> list[str]:
    """Names of checkpoints, whole or not, the newest first."""
    if not directory.exists():
        return []
    if reason := untrusted_reason(directory.resolve()):
        raise CheckpointError(reason)
    steps = [step for name in os.listdir(directory) if (step := step_of(name)) is not None]
    return [name_of(step) for step in sorted(steps, reverse=True)]


def pointed_at(hint: Path) -> str | None:
    """The name in a hint file (`latest`, `best`); None if it is missing or says nothing
    sensible.
    """
    try:
        name = hint.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return name if step_of(name) is not None else None


def newest_good(directory: Path) -> tuple[str | None, list[str]]:
    """The newest that verifies, and a sentence for each thing that is not as it should be on
    the way there.
    """
    names = saved_names(directory)
    sentences = _odd_hint(directory / "latest", names)
    for name in names:
        if not (found := manifest.problems(directory / name)):
            return name, sentences
        sentences.append(f"checkpoint {name} is skipped: {'; '.join(found)}")
    if names:
        raise CheckpointError(
            "\n  ".join(
                [
                    *sentences,
                    "none is left. Restore one, or move them away if the run shall start afresh",
                ]
            )
        )
    return None, sentences


def checkpoint_at(directory: Path, step: int | None) -> str:
    """The name of the checkpoint of `step`, or of the one marked best if `step` is None; it was
    verified.
    """
    name = name_of(step) if step is not None else pointed_at(directory / "best")
    names = saved_names(directory)
    if name is None:
        raise CheckpointError("no checkpoint is marked as the best one")
    if name not in names:
        raise CheckpointError(f"{name} is not there; there are: {', '.join(names) or 'none'}")
    if found := manifest.problems(directory / name):
        raise CheckpointError("\n  ".join([f"{name} is not whole:", *found]))
    return name


def _odd_hint(latest: Path, names: list[str]) -> list[str]:
    if not os.path.lexists(latest) or (name := pointed_at(latest)) in names:
        return []
    return [f"{latest} " + (f"names {name}, which is not there" if name else "names no checkpoint")]
