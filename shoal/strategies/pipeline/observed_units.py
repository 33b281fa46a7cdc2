"""The units of a model for a number of stages, and one run of the user's function with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.data.seeds import HostGenerators, preserve_rng_state
from shoal.errors import did_you_mean
from shoal.strategies.module_snapshot import ModelSnapshot
from shoal.strategies.pipeline.absent import WalkRefusal
from shoal.strategies.pipeline.meta_call import OutputForms
from shoal.strategies.pipeline.random_streams import check_host_draws
from shoal.strategies.pipeline.stage_map import StageMap
from shoal.strategies.pipeline.unit_profile import UnitProfile
from shoal.strategies.pipeline.units import UnitCall, Units, enclosing, find_units


class PlanRequest(NamedTuple):
    """The user's wishes for a partition.

    Attributes:
        num_stages: of the whole pipeline.
        by: "time" or "parameters".
        cuts: names of the modules that begin stages 1, 2, ..., with / between them; empty to
            balance.
    """

    num_stages: int
    by: str
    cuts: str

    @property
    def cut_names(self) -> list[str]:
        return self.cuts.split("/") if self.cuts else []


class ObservedUnits(NamedTuple):
    """The units of a model, and one run of the user's function on a sample with them.

    Attributes:
        calls: of units, in order. Those of the first rank of the world, where ranks have agreed.
    """

    units: Units
    forms: OutputForms
    profile: UnitProfile
    calls: Sequence[UnitCall]

    def stage_map(self, stage_starts: Sequence[int]) -> StageMap:
        """Return the stages of all calls."""
        stages = {
            call: sum(start <= index for start in stage_starts)
            for index, call in enumerate(self.calls)
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
            return observe_named(units, function)
        more = inside or _largest_divisible(units, named | writers)
        if not more and with_plain:
            raise WalkRefusal(_too_few_places(profile, request, num_places))
        with_plain = not more
        expanded |= more


def observe_named(units: Units, function: Callable[[], Any]) -> ObservedUnits:
    """Run the function once with these units. The model stays as it was."""
    forms = OutputForms(units.model, units.modules)
    profile = observed_run(units, forms, function)
    return ObservedUnits(units, forms, profile, profile.calls)


def observed_run(
    units: Units, forms: OutputForms | None, function: Callable[[], Any], timed: bool = False
) -> UnitProfile:
    """Run the function with all units. The model and the random numbers stay as they were."""
    saved = ModelSnapshot(units.model)
    profile = UnitProfile(units, forms, timed)
    try:
        with (
            preserve_rng_state([units.device]),
            units.watched(),
            units.observed_by(profile),
            profile,
        ):
            before = HostGenerators.now()
            function()
            check_host_draws(before)
        profile.mutated_buffers = saved.mutated()
    finally:
        saved.restore()
    return profile


def open_places(profile: UnitProfile, request: PlanRequest) -> list[int]:
    """Return the indices of calls with which a stage may begin; a named one may have no units."""
    closed = {place for way in profile.side_ways for place in range(way.made + 1, way.used + 1)}
    first = 0 if request.cuts else 1
    return [place for place in range(first, len(profile.calls)) if place not in closed]


def side_way(profile: UnitProfile, place: int | None = None) -> str:
    """Tell why no stage begins at a place; None: at any."""
    for way in profile.side_ways:
        if place is None or way.made < place <= way.used:
            maker = profile.calls[way.made].unit
            return (
                f"{maker} makes something that it does not return and {way.user} uses later. "
                "Return it from the block, or switch it off. "
            )
    return "a stage would begin without a block before it."


def _check_cut_name(model: nn.Module, name: str, cuts: str) -> None:
    known = dict(model.named_modules(remove_duplicate=False))
    if name not in known or not name:
        raise WalkRefusal(
            f"cuts={cuts}: no module of the model is called '{name}'; "
            f"{did_you_mean(name, set(known) - {''})}"
        )


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
    reason = side_way(profile) if profile.side_ways else ""
    return (
        f"pipeline: {request.num_stages} stages need {request.num_stages - 1} places between "
        f"blocks of the model, and there are {num_places}. {reason}Use fewer stages."
    )
