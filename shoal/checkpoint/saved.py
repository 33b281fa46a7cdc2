"""A checkpoint in memory: the tensors that a rank reads of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint import manifest, tensor_files
from shoal.checkpoint.rank_consensus import rank, world_size
from shoal.errors import CheckpointError

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


def load_tensors(path: Path, sha256: str, like: tensor_files.LayoutLookup) -> Saved:
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
