"""The partition of a model: which calls of units each stage has.

[1] `observe_units` runs the user's function on a sample, with units small enough for so many
    stages.
[2] `plan` measures the units, and chooses the cuts (`balanced`) or finds those that the user has
    named. Rank 0 alone does that, since every rank would measure other times; the others get its
    choice.

Data ranks see other samples. A function that calls a block once for each image calls it four times
on one rank and three times on another, and each alone would find other units, stages and users of
parameters. So the first rank's units and calls hold for all, and what any rank has seen of
parameters and buffers holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from shoal.comm.axis import Axis
from shoal.data.seeds import preserve_rng_state
from shoal.errors import StrategyRefused
from shoal.strategies.full_model import enclosing
from shoal.strategies.options import PipelineOptions
from shoal.strategies.pipeline.absent import WalkRefusal, absence_explained, refusals_as_errors
from shoal.strategies.pipeline.observed_units import (
    UnitProfile,
    observe_named,
    observed_run,
    open_places,
    side_way,
)
from shoal.strategies.pipeline.units import StageMap, UnitCall, Units
from shoal.strategies.pipeline.walk import DryRun

REPEATS = 3
"""Measured runs; the shortest time of each call counts, for the first one warms up."""


def plan(
    world: Axis,
    observed: UnitProfile,
    options: PipelineOptions,
    function: Callable[[], Any],
) -> tuple[list[int], str]:
    """Choose the cuts on rank 0 and return them on every rank. Collective over the world.

    Returns: the indices of the calls with which stages 1, 2, ... begin; and in words what is called
        there, and the share of each stage in all costs.

    Raises: StrategyRefused, on every rank: a name is no place to cut, or there are too few places.
    """
    made = agreed(world, lambda: None if world.rank else _plan(observed, options, function))
    starts, described = world.broadcast_json(made)
    return starts, described


def dry_run(observed: UnitProfile, stage_map: StageMap, function: Callable[[], Any]) -> DryRun:
    """Return a dry run of the function with these stages. The model stays as it was."""
    dry = DryRun(observed.units, stage_map)
    device = observed.units.device
    with preserve_rng_state([device]), observed.units.watched(), absence_explained():
        dry.run(function)
    return dry


def _plan(
    observed: UnitProfile, options: PipelineOptions, function: Callable[[], Any]
) -> tuple[list[int], str]:
    places = open_places(observed, options)
    costs = _costs(observed, function, options.balance == "time")
    if options.cuts:
        starts = _named_starts(observed, options, places)
    else:
        crossing = _crossing_bytes(observed, function)
        starts = balanced(costs, crossing, places, options.num_stages)
    total = sum(costs) or 1.0
    bounds = [0, *starts, len(costs)]
    shares = [f"{100 * sum(costs[start:stop]) / total:.0f} %" for start, stop in pairwise(bounds)]
    names = [observed.calls[start].unit for start in starts]
    return starts, f"cut before {', '.join(names)}: {options.balance} {' | '.join(shares)}"


def _costs(observed: UnitProfile, function: Callable[[], Any], measured: bool) -> list[float]:
    """Return the seconds of each call, or the number of parameters that it is the first to use."""
    if measured:
        runs = [observed_run(observed.units, function, timed=True) for _ in range(REPEATS)]
        return [min(times) for times in zip(*(run.times_s for run in runs), strict=True)]
    counted: set[int] = set()
    counts = []
    for call in observed.calls:
        new = {id(p): p for p in observed.units.modules[call.unit].parameters()}
        counts.append(float(sum(p.numel() for key, p in new.items() if key not in counted)))
        counted |= new.keys()
    return counts


def _crossing_bytes(observed: UnitProfile, function: Callable[[], Any]) -> list[float]:
    """Return for each place the bytes that a cut there sends: a dry run with a stage for each
    call.
    """
    every_place = observed.stage_map(range(1, len(observed.calls)))
    dry = dry_run(observed, every_place, function)
    return [0.0, *map(float, dry.crossing_bytes()), 0.0]


def _named_starts(profile: UnitProfile, options: PipelineOptions, places: list[int]) -> list[int]:
    """Return the first calls of the modules of `options.cuts`."""
    starts = []
    for name in options.cut_names:
        indices = [i for i, call in enumerate(profile.calls) if enclosing(call.unit, [name])]
        if not indices:
            raise StrategyRefused(
                f"cuts={options.cuts}: the function does not call {name}. Name a module that it "
                "calls."
            )
        starts.append(indices[0])
        if indices[0] not in places:
            raise StrategyRefused(
                f"cuts={options.cuts}: {side_way(profile, indices[0])} Name another module."
            )
    if starts != sorted(set(starts)):
        raise StrategyRefused(
            f"cuts={options.cuts}: name modules in the order of the forward pass, each once."
        )
    return starts


SLACK = 1.05
"""The longest stage may be 5 % longer than in the best partition if less is sent that way."""


def balanced(
    costs: Sequence[float],
    crossing: Sequence[float],
    places: Sequence[int],
    num_stages: int,
) -> list[int]:
    """Return the first steps of stages 1, 2, ...

          costs     1   1   4   1   1   1        seconds, or numbers of parameters, of each step
          places      1   2   3   4   5          where the model can be cut
          2 stages            │                  cut before step 3: 6 | 3; or before step 2: 2 | 7

    Dynamic programming over (number of stages, place): O(stages * places^2). First find the
    shortest possible longest stage. Then, among partitions whose longest stage is at most SLACK
    times as long, take the one that sends least.

    Args:
        costs: of each step, in any unit.
        crossing: for each place, the amount that a cut there sends; any unit.
        places: steps that may begin a stage, ascending.
        num_stages: at most len(places) + 1.

    Returns: num_stages - 1 of `places`, ascending.
    """
    assert 0 < num_stages <= len(places) + 1
    prefix = [0.0, *accumulate(costs)]
    ends = [*places, len(costs)]
    shortest = _partition(prefix, ends, num_stages)
    longest = max(
        prefix[stop] - prefix[start] for start, stop in pairwise([0, *shortest, len(costs)])
    )
    # The tiny addend: with costs of zero, no stage would be below a limit of zero.
    return _partition(prefix, ends, num_stages, crossing, longest * SLACK + 1e-30)


def _partition(
    prefix: Sequence[float],
    ends: Sequence[int],
    num_stages: int,
    crossing: Sequence[float] | None = None,
    limit: float = inf,
) -> list[int]:
    """Return the first steps of stages 1, 2, ... of the best partition.

    Minimise, in this order: (1) the cost of the longest stage, or else the amount sent, where no
    stage costs more than `limit`; (2) the sum of squared stage costs, so that the other stages are
    even too.

    Args:
        prefix: prefix[i] is the cost of all steps before step i.
        ends: the places, and the number of steps.
        crossing: as in `balanced`; None to minimise the longest stage.
    """
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for _ in range(num_stages):
        before, best = best, {}
        for stop in ends:
            sent = crossing[stop] if crossing is not None and stop < ends[-1] else 0.0
            found = (inf, inf, 0)
            for start, (first, squares, _) in before.items():
                length = prefix[stop] - prefix[start]
                if start < stop and length <= limit:
                    longest_or_sent = first + sent if crossing is not None else max(first, length)
                    found = min(found, (longest_or_sent, squares + length**2, start))
            if found[0] < inf:
                best[stop] = (*found[:2], [*before[found[2]][2], stop])
    return best[ends[-1]][2][:-1]


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
