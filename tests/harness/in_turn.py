"""Several calls of a function in one world, whose start costs as much as ten small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_turn(function: Callable[..., T], *calls: tuple[object, ...]) -> list[T]:
    """Return what `function` returns for the arguments of each call.

        world.run(2, in_turn, trained, ("ddp", 1), ("zero3", 2))

    A world gives one such list for each rank.
    """
    return [function(*arguments) for arguments in calls]
