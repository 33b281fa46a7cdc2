"""Saves in the background: the state is copied at once, and a thread writes the copy.

      training   step 7 ─ copy ─ step 8 ─ step 9 ─ step 10 ─ wait ─ copy ─ step 11 ...
      thread               └ write, hash, fsync, consensus, rename, read back ┘ └ ...

Tensors that are full on every rank are divided among ranks: each rank copies and writes some of
them. In a pipeline that holds for the ranks of each stage, whose numbers are consecutive.

The thread has a process group of its own. First all ranks learn if every rank has its copy: if one
has no memory for it, the save fails on all ranks. At most one save is in flight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.checkpoint.rank_consensus import rank, world_size
from shoal.checkpoint.store import Checkpoints
from shoal.comm.norm import to_local
from shoal.errors import CheckpointError
from shoal.launch.failure import lost_worker


class AsyncSaver:
    """Saves to `checkpoints` in one thread.

    Args:
        checkpoints: nothing else may use their group while a save is in flight.
        ranks_per_stage: number of consecutive ranks that hold the same full tensors; 0 for all.
    """

    def __init__(self, checkpoints: Checkpoints, ranks_per_stage: int = 0) -> None:
        self._checkpoints = checkpoints
        self._ranks = ranks_per_stage or world_size()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._copies: dict[str, Tensor] = {}
        self._saving: Future[Path] | None = None

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        info: Mapping[str, Any],
        private: Mapping[str, Tensor],
        best: bool,
    ) -> None:
        """Copy, and begin to save as `Checkpoints.save` does. Collective; call it after `wait`."""
        assert self._saving is None
        share = _share(tensors, rank() % self._ranks, self._ranks)
        private_copies: dict[str, Tensor] = {}
        problem: Exception | None = None
        try:
            self._copy({name: tensor for name, tensor in tensors.items() if name in share})
            private_copies = {name: tensor.clone() for name, tensor in private.items()}
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError without memory
            if lost_worker(error):
                raise
            problem = error
        check_copy = partial(_digest_unless, problem, _digest(tensors))
        self._saving = self._thread.submit(
            self._save, check_copy, step, self._copies, dict(info), private_copies, best
        )

    def _save(self, check_copy: Callable[[], str], step: int, *state: Any) -> Path:
        """Run in the thread: check the copies of all ranks, then save. Collective."""
        digests = self._checkpoints.consensus.on_every_rank(
            f"step {step} was not saved, there is no copy of it", check_copy
        )
        stages = [digests[i : i + self._ranks] for i in range(0, len(digests), self._ranks)]
        if any(len(set(stage)) > 1 for stage in stages):
            raise CheckpointError(
                f"step {step} was not saved: ranks hold different tensors outside of shards, and "
                "none would write some of them. Use --checkpoint.asynchronous false."
            )
        return self._checkpoints.save(step, *state)

    def wait(self) -> None:
        """Wait until the save in flight has ended.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()

    def close(self) -> BaseException | None:
        """End the thread, after the save in flight. Return its error if `wait` did not raise it."""
        self._thread.shutdown()
        return None if self._saving is None else self._saving.exception()

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into the memory of the last copy where it fits.

        To allocate memory takes longer than to fill it.
        """
        copies = {}
        for name, tensor in tensors.items():
            old = self._copies.get(name)
            if old is None or not _same_layout(old, tensor):
                old = _staging_buffer(tensor)
            copies[name] = old
        self._copies = copies
        with torch.no_grad():
            for name, tensor in tensors.items():
                to_local(self._copies[name]).copy_(to_local(tensor))


def _digest_unless(problem: Exception | None, digest: str) -> str:
    """Raise the problem of this rank's copy, or return the digest."""
    if problem is not None:
        raise problem
    return digest


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names and sizes of full tensors, on which `_share` depends.

    If digests differ, ranks would divide different tensors, and none would write some of them.
    """
    sizes = sorted(
        (name, tensor.nbytes) for name, tensor in tensors.items() if not isinstance(tensor, DTensor)
    )
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def _share(tensors: Mapping[str, Tensor], index: int, ranks: int) -> set[str]:
    """Return names of the tensors that rank `index` of a stage copies and writes.

    They are its shards, and some of the tensors that are full on every rank: the largest first,
    each to the rank with the fewest bytes so far.
    """
    full = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    share = set(tensors) - set(full)
    loads = [0] * ranks
    for name in sorted(full, key=lambda name: (-tensors[name].nbytes, name)):
        writer = loads.index(min(loads))
        loads[writer] += tensors[name].nbytes
        if writer == index:
            share.add(name)
    return share


def _staging_buffer(tensor: Tensor) -> Tensor:
    """Return memory for a copy: on the CPU, or for a DTensor on the device of its mesh."""
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor.detach())
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return (
        type(a) is type(b)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and to_local(a).shape == to_local(b).shape
    )
