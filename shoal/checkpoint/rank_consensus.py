"""Ranks that succeed together or fail together.

Values are sent as JSON in uint8 tensors on the CPU, and nothing is unpickled. So a group with NCCL
needs Gloo too (`cpu:gloo,cuda:nccl`). Without a process group there is one rank, and nothing is
sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import all_gather_bytes, check_lengths
from shoal.errors import CheckpointError
from shoal.launch.failure import lost_worker

T = TypeVar("T")


def rank() -> int:
    """Return the rank of this process in the default group; 0 without a group."""
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of ranks in the default group; 1 without a group."""
    return dist.get_world_size() if _has_group() else 1


class RankConsensus:
    """Lets all ranks of a group know if each of them has succeeded.

    Args:
        group: of all ranks; None for the default group. A thread in the background needs a
            group of its own, because collectives of two threads in one group would be mixed up.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of ranks. Collective.

        Args:
            value: a JSON value; its type may differ between ranks.
        """
        if not _has_group():
            return [value]
        message = json.dumps(value).encode()
        messages = all_gather_bytes(message, world_size(), torch.device("cpu"), self.group)
        return [json.loads(each) for each in messages]

    def on_every_rank(self, failure: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank, and return its results in the order of ranks. Collective.

        Args:
            failure: the beginning of the error, such as "step 7 was not saved".
            action: returns a JSON value.

        Raises:
            CheckpointError: on every rank, if `action` raised on any. It names each such rank and
                its reason.
            RuntimeError: on this rank alone, if it lost a data-loader worker meanwhile: that ends
                the rank, and its launcher ends the others, which wait here.
        """
        result: T | None = None
        cause: Exception | None = None
        try:
            result = action()
        except Exception as error:  # the other ranks wait for the result
            if lost_worker(error):
                raise
            cause = error
        outcomes = self.all_gather_objects(
            {"result": result, "problem": cause and _describe(cause)}
        )
        failures = [
            (r, outcome["problem"]) for r, outcome in enumerate(outcomes) if outcome["problem"]
        ]
        if failures:
            is_single = world_size() == 1
            reasons = [problem if is_single else f"rank {r}: {problem}" for r, problem in failures]
            raise CheckpointError("\n  ".join([f"{failure}:", *reasons])) from cause
        return [outcome["result"] for outcome in outcomes]

    def gather(self, failure: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank, and return its results on rank 0. Collective.

        Args: failure, action: as of `on_every_rank`.

        Returns: the results in the order of ranks; an empty list on the other ranks.
        Raises: as `on_every_rank`.
        """
        own: list[Any] = []
        self.on_every_rank(failure, lambda: own.append(action()))
        if not _has_group():
            return own
        message = json.dumps(own[0]).encode()
        lengths = [int(text) for text in self.all_gather_objects(len(message))]
        check_lengths(lengths)
        rows = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths]
        dist.gather(_padded(message, max(lengths)), rows if rank() == 0 else None, group=self.group)
        if rank() != 0:
            return []
        return [json.loads(_bytes(row)) for row in rows]

    def scatter(self, failure: str, action: Callable[[], list[Any]]) -> Any:
        """Run `action` on rank 0, and return the result of this rank's number. Collective.

        Args: action: returns a JSON value for each rank.

        Raises: as `on_every_rank`.
        """
        values: list[Any] = []
        self.on_rank_zero(failure, lambda: values.extend(action()))
        if not _has_group():
            return values[0]
        messages = [json.dumps(value).encode() for value in values]
        longest = self.on_rank_zero(failure, lambda: max(len(message) for message in messages))
        check_lengths([longest])
        own = torch.empty(longest, dtype=torch.uint8)
        rows = [_padded(message, longest) for message in messages]
        dist.scatter(own, rows if rank() == 0 else None, group=self.group)
        return json.loads(_bytes(own))

    def on_rank_zero(self, failure: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only, and return its result on every rank. Collective.

        Raises:
            CheckpointError: on every rank, if `action` raised.
        """
        results = self.on_every_rank(failure, lambda: action() if rank() == 0 else None)
        return results[0]  # type: ignore[return-value]


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _padded(message: bytes, size_bytes: int) -> Tensor:
    """Return JSON as a tensor of uint8, with spaces behind it."""
    return torch.frombuffer(bytearray(message.ljust(size_bytes)), dtype=torch.uint8)


def _bytes(row: Tensor) -> bytes:
    return row.numpy().tobytes()


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
