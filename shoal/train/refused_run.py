"""The end of a run whose strategy is refused before its first step: it leaves no directory behind.

A pipeline is planned with the first batch, when the run directory and its log are there already.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import StrategyRefused

if TYPE_CHECKING:
    from shoal.train.training_state import TrainingState


@contextmanager
def remove_if_refused(directory: Path, state: TrainingState, rank: int) -> Iterator[None]:
    """Remove a new run directory, and parents made for it, if the strategy is refused.

    A directory that was there before stays as it is, and so does one with results of a step. Enter
    it before the directory is made.
    """
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield
    except StrategyRefused:
        if directory in new and state.step == 0 and rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            for parent in new[1:]:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()
        raise
