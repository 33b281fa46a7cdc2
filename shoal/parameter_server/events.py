"""Messages to and from a shard, as plain values. `codec.py` has their form in a frame.

A partition is named by its number, in the field `part`. Gradients and values are flat tensors of
the partition's length. A `grad_mask` has a byte for each segment: 1 where it has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.parameter_server.optimizer_spec import Settings


class StepRequest(NamedTuple):
    """A worker's request for an optimizer step, sent once a step to every shard.

    Attributes:
        settings: of each optimizer group.
        scale: factor of the gradients, for clipping and for a sample count that is known late.
        leaves_out: drop the gradients, and change no value. A synchronous step is left out if any
            worker asks for it.
        without: names of parameters whose gradients are dropped. In a synchronous step those that
            any worker names.
    """

    settings: list[Settings]
    scale: float = 1.0
    leaves_out: bool = False
    without: Sequence[str] = ()

    def mask(self, grad_mask: bytes, names: Iterable[str]) -> bytes:
        """Return the mask of a partition's gradients that are used.

        Args: names: the parameters of the partition's segments.
        """
        if self.leaves_out:
            return bytes(len(grad_mask))
        if not self.without:
            return grad_mask
        pairs = zip(grad_mask, names, strict=True)
        return bytes(present and name not in self.without for present, name in pairs)


class PullResponse(NamedTuple):
    """A partition's values, for one worker.

    Attributes:
        clock: steps of this worker that the values include.
        min_clock: steps of the slowest worker that the values include.
        changed_blocks: bool, for each block whether the last step has changed it; None where that
            is not known.
    """

    worker: int
    part: int
    clock: int
    min_clock: int
    values: Tensor
    changed_blocks: Tensor | None = None


class GradNormResponse(NamedTuple):
    """Sum of the squares of a partition's gradient sum, for one worker."""

    worker: int
    part: int
    squared: float


class GradResponse(NamedTuple):
    """Sum of all workers' gradients of a partition, for one worker."""

    worker: int
    part: int
    values: Tensor
    grad_mask: bytes


class GradientUpdate(NamedTuple):
    """Gradient of one update of a partition.

    Attributes:
        worker: the worker that pushed it; -1 for the sum of all.
        step: of that worker.
    """

    worker: int
    step: int
    gradient: Tensor
    grad_mask: bytes


class ReplicateUpdate(NamedTuple):
    """An update that the primary has applied, for a backup."""

    backup: int
    part: int
    clock: int  # of the partition, before the update
    update: GradientUpdate
    settings: Settings


class PartitionCopy(NamedTuple):
    """A partition with its optimizer state, for a new backup or for another shard."""

    part: int
    clock: int
    values: Tensor
    state: list[dict[str, Any]]
    steps_by_worker: dict[int, int]


class InstallSnapshot(NamedTuple):
    """A partition as the primary has it, for a new backup."""

    backup: int
    content: PartitionCopy


class LoadDone(NamedTuple):
    """Answer to a worker's load: the partition has the worker's values."""

    worker: int
    part: int


class Acknowledged(NamedTuple):
    """A backup's acknowledgement of all updates of a partition before `clock`."""

    part: int
    clock: int


class InSync(NamedTuple):
    """Report that a backup has acknowledged all its snapshots."""

    backup: int


class TransferDone(NamedTuple):
    """Report that a partition has migrated here, and every backup has it.

    Attributes:
        start_version: placement version in which the migration started.
        source: the server that sent the partition.
    """

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
    """A message that makes no sense here. The receiver closes the connection."""


class NotOwner(Exception):
    """A request for a partition that another shard owns, or that is in transit."""

    def __init__(self, part: int) -> None:
        super().__init__(part)
        self.part = part
