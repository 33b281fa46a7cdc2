"""This process among the ranks of a run: its place, and what it does before or instead of others.

These are methods of `Run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.comm.mesh import Mesh
from shoal.errors import CollectiveFailed, headline_of
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


class ThisRank:
    """One process of a run.

    Attributes: mesh: all ranks, their axes and process groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.mesh.size

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its host, from 0."""
        return self.mesh.place.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this rank's model and batches."""
        return self.mesh.device

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only. The arguments are those of Python's `print`."""
        if self.rank == 0:
            print(*values, **options)

    @contextmanager
    def main_first(self, local: bool = False) -> Iterator[None]:
        """Return a context that rank 0 leaves before the others enter. Collective.

        with run.main_first():
            dataset = MNIST("data", download=True)  # rank 0 downloads, the others find the files

        The other ranks wait for at most ten times the limit of a hang.

        Args: local: the first rank of each host goes first, for files on a disk of each host.

        Raises: CollectiveFailed: on the ranks that wait, if the block has failed on the first one.
        """
        if (self.local_rank if local else self.rank) != 0:
            with own_progress().during(Phase.SAVE):
                failures = list(filter(None, self.mesh.all_gather_str("")))
            if failures:
                raise CollectiveFailed(f"run.main_first: the first rank has failed: {failures[0]}")
            yield
            return
        failure = ""
        try:
            with own_progress().during(Phase.SAVE):
                yield
        except BaseException as error:
            failure = headline_of(error) or type(error).__name__
            raise
        finally:
            self.mesh.all_gather_str(failure)
