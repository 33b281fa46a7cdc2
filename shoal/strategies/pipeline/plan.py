"""The partition of a model: which calls of units each stage has.

[1] `observe_units` runs the user's function on a sample, with units small enough for so many
    stages.
[2] `plan` measures the units, and chooses the cuts (`balance.py`) or finds those that the user has
    named. Rank 0 alone does that, since every rank would measure other times; the others get its
    choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused, did_you_mean
from shoal.strategies.colocation import Colocation, ColocationRequest
from shoal.strategies.full_model import FullModel
from shoal.strategies.pipeline.absent import WalkRefusal
from shoal.strategies.pipeline.balance import balanced
from shoal.strategies.pipeline.dry_run import DryRun
from shoal.strategies.pipeline.output_forms import OutputForms
from shoal.strategies.pipeline.random_streams import preserved_generators
from shoal.strategies.pipeline.trial_state import SavedState
from shoal.strategies.pipeline.unit_profile import UnitProfile
from shoal.strategies.pipeline.units import UnitCall, Units, enclosing, find_units
from shoal.strategies.pipeline.walk import StageMap


class StagePlan(NamedTuple):
    """The cuts of a model.

    Attributes:
        stage_starts: indices of the calls with which stages 1, 2, ... begin.
        names: of the units that are called there, for messages.
        cost_fractions: for each stage its share of all costs; they sum to 1.
        measured: costs are times; else they are numbers of parameters.
    """

    stage_starts: list[int]
    names: list[str]
    cost_fractions: list[float]
    measured: bool


class PlanRequest(NamedTuple):
    """The user's wishes for a partition.

    Attributes:
        num_stages: of the whole pipeline.
        by: "time" or "parameters".
        cuts: names of the modules that begin stages 1, 2, ..., with / between them; empty to
            balance.
        colocations: modules that must lie in one stage. They have no effect on cuts by name.
    """

    num_stages: int
    by: str
    cuts: str
    colocations: Sequence[ColocationRequest] = ()

    @property
    def cut_names(self) -> list[str]:
        return self.cuts.split("/") if self.cuts else []


class ObservedUnits(NamedTuple):
    """The units of a model, and one run of the user's function on a sample with them."""

    units: Units
    forms: OutputForms
    profile: UnitProfile

    def stage_map(self, stage_starts: Sequence[int]) -> StageMap:
        """Return the stages of all calls."""
        stages = {
            call: sum(start <= index for start in stage_starts)
            for index, call in enumerate(self.profile.calls)
        }
        return StageMap([*self.units.modules], stages, len(stage_starts))


def observe_units(
    model: nn.Module, function: Callable[[], Any], request: PlanRequest, device: torch.device
) -> ObservedUnits:
    """Find the units of a model, and run the function once. The model stays as it was.

    Modules are looked into until there are enough places between calls of units. Modules without
    parameters are units only if that does not suffice.

    Raises: WalkRefusal: there are too few.
    """
    expanded: set[str] = set()
    named = set(request.cut_names)
    writers: set[str] = set()
    for name in named:
        _check_cut_name(model, name, request.cuts)
    with_plain = False
    while True:
        names = find_units(model, request.num_stages, expanded, named | writers, with_plain)
        units = Units(model, names, device)
        profile = observed_run(units, None, function)
        inside = _used_without_call(units, profile)
        more_writers = _writers_around(units, profile) - writers
        if more_writers:
            writers |= more_writers
            continue
        num_places = len(open_places(profile, request))
        if not inside and (num_places + 1 >= request.num_stages or request.cuts):
            forms = OutputForms(model, units.modules)
            return ObservedUnits(units, forms, observed_run(units, forms, function))
        more = inside or _largest_divisible(units, named | writers)
        if not more and with_plain:
            raise WalkRefusal(_too_few_places(profile, request, num_places))
        with_plain = not more
        expanded |= more


def observed_run(
    units: Units, forms: OutputForms | None, function: Callable[[], Any], timed: bool = False
) -> UnitProfile:
    """Run the function with all units. The model and the random numbers stay as they were."""
    saved = SavedState(units.model)
    profile = UnitProfile(units, forms, timed)
    try:
        with (
            preserved_generators(units.device),
            units.watched(),
            units.observed_by(profile),
            profile,
        ):
            function()
        profile.mutated_buffers = saved.mutated()
    finally:
        saved.restore()
    return profile


def open_places(profile: UnitProfile, request: PlanRequest) -> list[int]:
    """Return the indices of calls with which a stage may begin.

    A stage without units is of use only where modules must lie in one stage.
    """
    closed = {place for way in profile.side_ways for place in range(way.made + 1, way.used + 1)}
    first = 0 if request.cuts else 1
    return [place for place in range(first, len(profile.calls)) if place not in closed]


def plan(
    world: Axis,
    observed: ObservedUnits,
    request: PlanRequest,
    function: Callable[[], Any],
    full_model: FullModel,
) -> StagePlan:
    """Choose the cuts on rank 0 and return them on every rank. Collective over the world.

    Args: full_model: the model as one stage, for the colocations.

    Raises: StrategyRefused, on every rank: a name is no place to cut, there are too few places, or
        a colocation cannot be found.
    """
    sent = ""
    if world.rank == 0:
        try:
            sent = json.dumps(_plan(observed, request, function, full_model)._asdict())
        except (StrategyRefused, WalkRefusal) as refusal:
            sent = json.dumps({"refusal": str(refusal)})
    received = json.loads(world.broadcast_str(sent))
    if "refusal" in received:
        raise StrategyRefused(received["refusal"])
    return StagePlan(**received)


def parameter_users(
    observed: ObservedUnits, stage_map: StageMap, function: Callable[[], Any]
) -> dict[str, set[int]]:
    """Return the parameters that code around units uses, with the stages in which it does."""
    dry = DryRun(observed.units, observed.forms, stage_map)
    with preserved_generators(observed.units.device), observed.units.watched():
        dry.run(function)
    return dry.parameter_users


def split_counts(calls: Sequence[UnitCall], colocations: Sequence[Colocation]) -> list[int]:
    """Count for each place how many colocations a cut there would separate.

          calls         up │ down │ norm │ head ──> output
          colocations   └─ pair ─┘        └── through output ──
          places      0    1      2      3      4       counts: 0 1 0 0 0

    Returns: len(calls) + 1 counts, from the place before call 0 to that after the last call.
    """
    counts = [0] * (len(calls) + 1)
    for names, through_output in colocations:
        indices = [index for index, call in enumerate(calls) if _touches(call.unit, names)]
        if not indices:
            continue
        last = len(calls) - 1 if through_output else max(indices)
        for place in range(min(indices) + 1, last + 1):
            counts[place] += 1
    return counts


def _plan(
    observed: ObservedUnits,
    request: PlanRequest,
    function: Callable[[], Any],
    full_model: FullModel,
) -> StagePlan:
    profile = observed.profile
    colocations: list[Colocation] = []
    if not request.cuts:
        for find in request.colocations:
            colocations += find(full_model)
    separations = split_counts(profile.calls, colocations)
    places = open_places(profile, request)
    if colocations:
        places = [0, *places]
    measured = request.by == "time"
    costs = _costs(observed, function, measured)
    if request.cuts:
        starts = _named_starts(profile, request, places)
    else:
        crossing = _crossing_bytes(observed, function)
        starts = balanced(costs, crossing, places, request.num_stages, separations)
    return StagePlan(
        stage_starts=starts,
        names=[profile.calls[start].unit for start in starts],
        cost_fractions=_cost_fractions(costs, starts),
        measured=measured,
    )


def _costs(observed: ObservedUnits, function: Callable[[], Any], measured: bool) -> list[float]:
    """Return the seconds of each call, or the number of parameters that it is the first to use."""
    if measured:
        return observed_run(observed.units, observed.forms, function, timed=True).times_s
    counted: set[int] = set()
    counts = []
    for call in observed.profile.calls:
        new = {id(p): p for p in observed.units.modules[call.unit].parameters()}
        counts.append(float(sum(p.numel() for key, p in new.items() if key not in counted)))
        counted |= new.keys()
    return counts


def _crossing_bytes(observed: ObservedUnits, function: Callable[[], Any]) -> list[float]:
    """Return for each place the bytes that a cut there sends: a dry run with a stage for each
    call.
    """
    every_place = observed.stage_map(range(1, len(observed.profile.calls)))
    dry = DryRun(observed.units, observed.forms, every_place)
    with preserved_generators(observed.units.device), observed.units.watched():
        dry.run(function)
    return [0.0, *map(float, dry.crossing_bytes()), 0.0]


def _cost_fractions(costs: Sequence[float], starts: Sequence[int]) -> list[float]:
    total = sum(costs) or 1.0
    boundaries = [0, *starts, len(costs)]
    return [sum(costs[start:stop]) / total for start, stop in pairwise(boundaries)]


def _check_cut_name(model: nn.Module, name: str, cuts: str) -> None:
    known = dict(model.named_modules(remove_duplicate=False))
    if name not in known or not name:
        raise WalkRefusal(
            f"cuts={cuts}: no module of the model is called '{name}'; "
            f"{did_you_mean(name, set(known) - {''})}"
        )


def _named_starts(profile: UnitProfile, request: PlanRequest, places: list[int]) -> list[int]:
    """Return the first calls of the modules of `request.cuts`."""
    starts = []
    for name in request.cut_names:
        indices = [i for i, call in enumerate(profile.calls) if _is_inside(call.unit, name)]
        if not indices:
            raise StrategyRefused(
                f"cuts={request.cuts}: the function does not call {name}. Name a module that it "
                "calls."
            )
        starts.append(indices[0])
        if indices[0] not in places:
            raise StrategyRefused(
                f"cuts={request.cuts}: {_side_way(profile, indices[0])} Name another module."
            )
    if starts != sorted(set(starts)):
        raise StrategyRefused(
            f"cuts={request.cuts}: name modules in the order of the forward pass, each once."
        )
    return starts


def _used_without_call(units: Units, profile: UnitProfile) -> set[str]:
    """Return the units of which modules inside are called without the unit itself."""
    called = {call.unit for call in profile.calls}
    used = {enclosing(name, units.modules) for name in profile.parameters_around}
    return {
        name
        for name in used
        if name is not None
        and name not in called
        and any(True for _ in units.modules[name].children())
    }


def _writers_around(units: Units, profile: UnitProfile) -> set[str]:
    """Return the modules around units that write into buffers of their own, as a BatchNorm without
    weights does. They must be units; a module that contains units cannot be one.
    """
    return {
        name
        for name, module in units.model.named_modules()
        if name
        and any(id(buffer) in profile.mutated_buffers for buffer in module.buffers(recurse=False))
        and enclosing(name, units.modules) is None
        and not any(unit.startswith(f"{name}.") for unit in units.modules)
    }


def _largest_divisible(units: Units, named: Set[str]) -> set[str]:
    """Return the unit with most parameters that contains others; empty if there is none."""
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in units.modules.items()
        if name not in named
        and any(any(True for _ in child.parameters()) for child in module.children())
        and not isinstance(module, nn.MultiheadAttention)
    }
    return {max(sizes, key=lambda name: sizes[name])} if sizes else set()


def _too_few_places(profile: UnitProfile, request: PlanRequest, num_places: int) -> str:
    reason = _side_way(profile) if profile.side_ways else ""
    return (
        f"pipeline: {request.num_stages} stages need {request.num_stages - 1} places between "
        f"blocks of the model, and there are {num_places}. {reason}Use fewer stages."
    )


def _side_way(profile: UnitProfile, place: int | None = None) -> str:
    for way in profile.side_ways:
        if place is None or way.made < place <= way.used:
            maker = profile.calls[way.made].unit
            return (
                f"{maker} makes something that it does not return and {way.user} uses later. "
                "Return it from the block, or switch it off. "
            )
    return "a stage would begin without a block before it."


def _is_inside(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _touches(unit: str, names: Set[str]) -> bool:
    return any(_is_inside(name, unit) or _is_inside(unit, name) for name in names)
