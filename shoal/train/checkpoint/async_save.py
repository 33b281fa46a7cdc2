"""Saving beside training: a copy is taken at once, and written by a thread while the next steps
run.

      training   step 7 ─ copy ─ step 8 ─ step 9 ─ step 10 ─ wait for the last one ─ copy ─ step 11 ...
      thread               └ write, hash, fsync, vote, rename, read back ┘            └ ...

What is whole on every rank is shared out: each rank copies and writes its part of it. In a pipeline
that is so for each stage, whose ranks stand in a row. The thread votes over a group of
its own, and first on the copies: where one rank has no memory for its own, that save fails on all
ranks. One save is under way at most."""

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

from shoal.comm.norm import to_local
from shoal.errors import CheckpointError
from shoal.train.checkpoint.rank_consensus import rank, world_size
from shoal.train.checkpoint.store import Checkpoints


class AsyncSaver:
    """One thread that saves to `checkpoints`, whose group nobody else may use while a save is under
    way.

    Args: alike: ranks in a row that hold the same wholes; 0 for all.
    """

    def __init__(self, checkpoints: Checkpoints, alike: int = 0) -> None:
        self._checkpoints, self._ranks = checkpoints, alike or world_size()
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
        """Copy and begin to save, as `Checkpoints.save`. All ranks must call it, after `wait`."""
        assert self._saving is None
        mine = _share(tensors, rank() % self._ranks, self._ranks)
        own: dict[str, Tensor] = {}
        problem: Exception | None = None
        try:
            self._copy({name: tensor for name, tensor in tensors.items() if name in mine})
            own = {name: tensor.clone() for name, tensor in private.items()}
        except (
            MemoryError,
            RuntimeError,
        ) as error:  # torch raises a RuntimeError where memory ends
            problem = error
        vote = partial(_digest_unless, problem, _digest(tensors))
        self._saving = self._thread.submit(
            self._save, vote, step, self._copies, dict(info), own, best
        )

    def _save(self, vote: Callable[[], str], step: int, *what: Any) -> Path:
        """In the thread: the vote on the copies, then the save. Collective."""
        digests = self._checkpoints.votes.on_every_rank(
            f"step {step} was not saved, there is no copy of it", vote
        )
        if any(
            len(set(digests[i : i + self._ranks])) > 1 for i in range(0, len(digests), self._ranks)
        ):
            raise CheckpointError(
                f"step {step} was not saved: ranks hold different tensors outside of shards, and "
                "none would write some of them. Use --checkpoint.asynchronous false."
            )
        return self._checkpoints.save(step, *what)

    def wait(self) -> None:
        """Until the save that is under way has ended. Raises CheckpointError: on every rank, if
        it failed on any.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> BaseException | None:
        """End the thread, after what it is doing. Returns why that failed, if it did and nobody
        has waited for it.
        """
        self._thread.shutdown()
        return None if self._saving is None else self._saving.exception()

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Into the memory of the last copy where it fits: to allocate it anew takes longer than
        to fill it.
        """
        old = self._copies
        self._copies = {
            name: old[name]
            if name in old and _same_layout(old[name], tensor)
            else _staging_buffers(tensor)
            for name, tensor in tensors.items()
        }
        with torch.no_grad():
            for name, tensor in tensors.items():
                to_local(self._copies[name]).copy_(to_local(tensor))


def _digest_unless(problem: Exception | None, digest: str) -> str:
    """This rank's word in the vote on the copies."""
    if problem is not None:
        raise problem
    return digest


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of all that `_share` looks at: with another one, a rank shares out something else."""
    whole = sorted(
        (name, tensor.nbytes) for name, tensor in tensors.items() if not isinstance(tensor, DTensor)
    )
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def _share(tensors: Mapping[str, Tensor], number: int, ranks: int) -> set[str]:
    """Names of what rank `number` copies and writes: its shards, and its part of what is whole
    on every rank.
    """
    whole = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    mine, loads = set(tensors) - set(whole), [0] * ranks
    for name in sorted(whole, key=lambda name: (-tensors[name].nbytes, name)):
        least = loads.index(min(loads))
        loads[least] += tensors[name].nbytes
        if least == number:
            mine.add(name)
    return mine


def _staging_buffers(tensor: Tensor) -> Tensor:
    """On the CPU; shards stay where they are, for a DTensor lies on its mesh's device."""
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
