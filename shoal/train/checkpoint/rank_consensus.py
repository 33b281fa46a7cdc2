"""Ranks that succeed together or fail together.

Values travel as JSON in uint8 tensors on the CPU: no pickle. Next to NCCL the group needs Gloo as
well (`cpu:gloo,cuda:nccl`). Without a process group there is one rank, and nothing is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.comm.axis import all_gather_bytes
from shoal.errors import CheckpointError

T = TypeVar("T")


def rank() -> int:
    """This process's number in the default group; 0 without a group."""
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    """Number of ranks in the default group; 1 without a group."""
    return dist.get_world_size() if _has_group() else 1


class RankConsensus:
    """How the ranks of one group learn of each other's success.

    Args: group: of all ranks; None for the default group. What votes beside training needs a group
        of its own, or
            collectives of two threads would meet each other's.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks, on every rank. All ranks must call it.

        Args:
            value: anything that `json` can write; its type may differ between ranks.
        """
        if not _has_group():
            return [value]
        message = json.dumps(value).encode()
        messages = all_gather_bytes(message, world_size(), torch.device("cpu"), self.group)
        return [json.loads(each) for each in messages]

    def on_every_rank(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; its JSON-able results, in the order of ranks. All ranks must
        call it.

        Args:
            what: the sentence that an error begins with, such as "step 7 was not saved".

        Raises: CheckpointError: on every rank, if `action` raised on any; names each such rank and
            its reason.
        """
        result: T | None = None
        cause: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  (whatever it is: the other ranks are waiting for this one's word)
            cause = error
        outcomes = self.all_gather_objects(
            {"result": result, "problem": cause and _in_words(cause)}
        )
        failures = [
            (r, outcome["problem"]) for r, outcome in enumerate(outcomes) if outcome["problem"]
        ]
        if failures:
            alone = world_size() == 1
            reasons = [problem if alone else f"rank {r}: {problem}" for r, problem in failures]
            raise CheckpointError("\n  ".join([f"{what}:", *reasons])) from cause
        return [outcome["result"] for outcome in outcomes]

    def on_rank_zero(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; its JSON-able result, on every rank. All ranks must call
        it.

        Raises:
            CheckpointError: on every rank, if `action` raised.
        """
        return self.on_every_rank(what, lambda: action() if rank() == 0 else None)[0]  # type: ignore[return-value]


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
