"""Saves in the background: the state is copied at once, and a thread writes the copy.

      training   step 7 ─ copy ─ step 8 ─ step 9 ─ step 10 ─ wait ─ copy ─ step 11 ...
      thread               └ write, hash, fsync, consensus, rename, read back ┘ └ ...

A tensor that several ranks hold is copied and written by one of them. If one rank has no memory for
its copies, the save fails on all ranks. The thread has a process group of its own. At most one save
is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.checkpoint.store import Checkpoints
from shoal.comm.norm import to_local


class AsyncSaver:
    """Saves to `checkpoints` in one thread.

    Args: checkpoints: nothing else may use their group while a save is in flight.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
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
        """Copy, and begin to save as `Checkpoints.save` does. Collective; call it after `wait`.

        Raises:
            CheckpointError: on every rank; one has no memory for its copies.
            UsageError: as `Checkpoints.save`.
        """
        assert self._saving is None
        division = self._checkpoints.divide(step, tensors, info, private)
        share = {name: division.entries[name] for name in division.share}
        self._checkpoints.consensus.on_every_rank(
            f"step {step} was not saved, there is no copy of it", lambda: self._copy(share)
        )
        division = replace(division, entries=self._copies)
        self._saving = self._thread.submit(self._checkpoints.write, division, dict(info), best)

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
            if old is None or _layout(old) != _layout(tensor):
                old = _staging_buffer(tensor)
            copies[name] = old
        self._copies = copies
        with torch.no_grad():
            for name, tensor in tensors.items():
                to_local(self._copies[name]).copy_(to_local(tensor))


def _staging_buffer(tensor: Tensor) -> Tensor:
    """Return memory for a copy: on the CPU, or for a DTensor on the device of its mesh."""
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor.detach())
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.dtype, to_local(tensor).shape
