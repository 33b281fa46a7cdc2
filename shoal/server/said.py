"""What is said to a shard and what it says, as plain values; how they stand in a frame is in `messages.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from shoal.server.recipe import Settings


class Order(NamedTuple):
    """What a worker says once for each step, to every server."""

    settings: list[Settings]  # of each optimizer group
    scale: float = 1.0  # by which gradients are multiplied before the step: clipping, a count known late


class Value(NamedTuple):
    """A part's new numbers, for one worker."""

    worker: int
    part: int
    clock: int  # steps of this worker that they include
    oldest: int  # steps of the slowest worker that they include
    numbers: Tensor
    changed: Tensor | None = None  # the blocks that the last step has changed, where they may be few


class Norm(NamedTuple):
    """Sum of the squares of a part's gradients, for one worker."""

    worker: int
    part: int
    squared: float


class Gradient(NamedTuple):
    """The sum of all gradients of a part, for one worker."""

    worker: int
    part: int
    numbers: Tensor
    present: bytes


class GradientUpdate(NamedTuple):
    """The gradient of one update of a part."""

    worker: int  # whose push it was; -1 for the sum of all
    step: int  # of that worker
    gradient: Tensor
    present: bytes  # a byte for each segment: 1 where it has a gradient


class Applied(NamedTuple):
    """An update, for a backup to repeat."""

    backup: int
    part: int
    clock: int  # before it
    update: GradientUpdate
    settings: Settings


class Filled(NamedTuple):
    """A whole part, for a backup that begins."""

    backup: int
    part: int
    clock: int
    values: Tensor
    state: list[dict[str, Any]]
    done: dict[int, int]


class Loaded(NamedTuple):
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


class Given(NamedTuple):
    """A whole part, for another shard."""

    part: int
    clock: int
    values: Tensor
    state: list[dict[str, Any]]
    done: dict[int, int]


class Adopted(NamedTuple):
    """A part that was given is here, and with every backup."""

    part: int
    since: int
    giver: int


Out = Value | Norm | Gradient | Loaded | Applied | Filled | Acknowledged | InSync | Adopted


class Refused(Exception):
    """A message that contradicts what is known; the connection is to be closed."""


class Elsewhere(Exception):
    """A message about a part for which this shard does not answer, or not now."""

    def __init__(self, part: int) -> None:
        super().__init__(part)
        self.part = part
