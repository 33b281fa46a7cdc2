"""What is said to a shard and what it says, as plain values; how they stand in a frame is in
`messages.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from shoal.parameter_server.optimizer_spec import Settings


class StepRequest(NamedTuple):
    """What a worker says once for each step, to every server."""

    settings: list[Settings]  # of each optimizer group
    scale: float = (
        1.0  # by which gradients are multiplied before the step: clipping, a count known late
    )


class PullResponse(NamedTuple):
    """A part's new numbers, for one worker."""

    worker: int
    part: int
    clock: int  # steps of this worker that they include
    min_clock: int  # steps of the slowest worker that they include
    values: Tensor
    changed_blocks: Tensor | None = (
        None  # the blocks that the last step has changed, where they may be few
    )


class GradNormResponse(NamedTuple):
    """Sum of the squares of a part's gradients, for one worker."""

    worker: int
    part: int
    squared: float


class GradResponse(NamedTuple):
    """The sum of all gradients of a part, for one worker."""

    worker: int
    part: int
    values: Tensor
    grad_mask: bytes


class GradientUpdate(NamedTuple):
    """The gradient of one update of a part."""

    worker: int  # whose push it was; -1 for the sum of all
    step: int  # of that worker
    gradient: Tensor
    grad_mask: bytes  # a byte for each segment: 1 where it has a gradient


class ReplicateUpdate(NamedTuple):
    """An update, for a backup to repeat."""

    backup: int
    part: int
    clock: int  # before it
    update: GradientUpdate
    settings: Settings


class InstallSnapshot(NamedTuple):
    """A whole part, for a backup that begins."""

    backup: int
    part: int
    clock: int
    values: Tensor
    state: list[dict[str, Any]]
    steps_by_worker: dict[int, int]


class LoadDone(NamedTuple):
    """A part is as a worker has asked for."""

    worker: int
    part: int


class Acknowledged(NamedTuple):
    """A backup holds all updates of a part before `clock`."""

    part: int
    clock: int


class InSync(NamedTuple):
    """A backup has been filled."""

    backup: int


class PartitionTransfer(NamedTuple):
    """A whole part, for another shard."""

    part: int
    clock: int
    values: Tensor
    state: list[dict[str, Any]]
    steps_by_worker: dict[int, int]


class TransferDone(NamedTuple):
    """A part that was given is here, and with every backup."""

    part: int
    start_version: int
    source: int


Outgoing = (
    PullResponse
    | GradNormResponse
    | GradResponse
    | LoadDone
    | ReplicateUpdate
    | InstallSnapshot
    | Acknowledged
    | InSync
    | TransferDone
)


class ProtocolViolation(Exception):
    """A message that contradicts what is known; the connection is to be closed."""


class NotOwner(Exception):
    """A message about a part for which this shard does not answer, or not now."""

    def __init__(self, part: int) -> None:
        super().__init__(part)
        self.part = part
