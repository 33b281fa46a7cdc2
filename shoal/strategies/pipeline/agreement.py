"""Agreement of all ranks on how a model is divided.

Data ranks see other samples. A function that calls a block once for each image calls it four times
on one rank and three times on another, and each alone would find other units, stages and users of
parameters. So the first rank's units and calls hold for all, and what any rank has seen of
parameters and buffers holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.strategies.pipeline.absent import WalkRefusal, refusals_as_errors
from shoal.strategies.pipeline.observed_units import UnitProfile, observe_named
from shoal.strategies.pipeline.units import UnitCall, Units


def agreed(axis: Axis, function: Callable[[], Any]) -> Any:
    """Return the function's result; raise on all ranks what it raises on one. Collective."""
    failure: BaseException | None = None
    result = None
    try:
        result = function()
    except (WalkRefusal, Exception) as error:  # noqa: BLE001 - of the user's function
        failure = error
    texts = axis.all_gather_str(str(failure or "") or ("" if failure is None else repr(failure)))
    if failure is not None:
        with refusals_as_errors():
            raise failure
    for text in texts:
        if text:
            raise StrategyRefused(f"another rank says: {text}")
    return result


def units_of_first_rank(
    world: Axis, observed: UnitProfile, function: Callable[[], Any]
) -> UnitProfile:
    """Return a run with the units that the first rank has found, with the calls that it has seen.

    Collective.

    Args: function: the user's, on this rank's sample, which runs again with other units.
    """
    own = [*observed.units.modules]
    names, calls = world.broadcast_json([own, observed.calls])

    def observe() -> UnitProfile:
        if names == own:
            return observed
        units = observed.units
        return observe_named(Units(units.model, names, units.device), function)

    same: UnitProfile = agreed(world, observe)
    same.calls = [UnitCall(*call) for call in calls]
    return same


def users_on_any_rank(world: Axis, users: Mapping[str, Set[int]]) -> dict[str, set[int]]:
    """Return for each name the stages that any rank has found to use it. Collective."""
    own = {name: sorted(stages) for name, stages in users.items()}
    united: dict[str, set[int]] = {}
    for users_there in world.all_gather_json(own):
        for name, stages in users_there.items():
            united.setdefault(name, set()).update(stages)
    return dict(sorted(united.items()))
