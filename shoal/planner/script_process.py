"""Plan a script in processes of its own, in which its weights take no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shoal.errors import ShoalError
from shoal.launch import preload
from shoal.launch.start import start
from shoal.planner.script_workload import FirstRun, script_workload
from shoal.testing.world import World

T = TypeVar("T")
LIMIT_S = 600.0
VARIABLES = {"OMP_NUM_THREADS": "1", "SHOAL_STRATEGY": "single", "TORCHDYNAMO_DISABLE": "1"}


def plan_in_script(
    words: Sequence[str], ranks: int, plan: Callable[..., T], *arguments: Any, accumulate: int = 0
) -> T:
    """Return `plan(workload, *arguments)`, called in the process of a script, which has its model.

    Args:
        words: the file of the script, and its own words.
        ranks: of the plan.
        plan: a function at the top of a module; it and its arguments and result are pickled.
        accumulate: micro-batches in the place of the script's own number; 0 for that.

    Raises: UsageError: the script cannot be followed; or what `plan` raised.
    """
    found: FirstRun | ShoalError | tuple[T] | None = None
    variables = VARIABLES | ({"SHOAL_ACCUMULATE": str(accumulate)} if accumulate else {})
    for _ in range(2):
        given = (tuple(words), ranks, found, plan, arguments)
        started = start(_follow, given, 1, variables, "lines", preload=preload.TRAINING)
        with World(started, LIMIT_S) as world:
            [found] = world.results()
        if isinstance(found, ShoalError):
            raise found
        if isinstance(found, tuple):
            return found[0]
    raise AssertionError("the second run answers")


def _follow(
    words: tuple[str, ...],
    ranks: int,
    first: FirstRun | None,
    plan: Callable[..., T],
    arguments: tuple[Any, ...],
) -> FirstRun | ShoalError | tuple[T]:
    path, *own = words
    try:
        found = script_workload(path, own, first, ranks)
        return found if isinstance(found, FirstRun) else (plan(found, *arguments),)
    except ShoalError as error:
        return error
