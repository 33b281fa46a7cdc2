"""The partition of a model: which steps each stage has.

[1] `trace_for` traces the model so that it has enough places to cut.
[2] `plan` measures the steps, and chooses the cuts (`balance.py`) or finds those that the user has
    named. Rank 0 alone does that, since every rank would measure other times; the others get its
    choice.
[3] `full_model` describes the result for strategies that come after the pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx, nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused, did_you_mean
from shoal.strategies.colocation import Colocation, ColocationRequest
from shoal.strategies.full_model import FullModel
from shoal.strategies.pipeline.balance import balanced
from shoal.strategies.pipeline.fx_trace import Traced, free_trace, trace_model
from shoal.strategies.pipeline.steps import (
    StepProfile,
    cut_points,
    live_across,
    parameter_counts,
    profile,
    steps_of,
)


class StagePlan(NamedTuple):
    """The cuts of a model.

    Attributes:
        stage_starts: first steps of stages 1, 2, ...
        names: of these steps, for messages.
        cost_fractions: for each stage its share of all costs; they sum to 1.
        measured: costs are times; else they are numbers of parameters.
        sent_bytes: for each cut, with the samples of the example batch; empty if nothing was
            measured.
    """

    stage_starts: list[int]
    names: list[str]
    cost_fractions: list[float]
    measured: bool
    sent_bytes: list[int]


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


def trace_for(
    model: nn.Module,
    num_stages: int,
    wrap_units: Set[str],
    num_inputs: int,
    sample: tuple[Any, ...] | None,
) -> Traced:
    """Trace a model so that it can be cut into `num_stages` stages.

    Wrap units stay one step each if that leaves enough places to cut; else the tracer looks into
    them.

    Args:
        wrap_units: paths of modules.
        num_inputs: positional inputs of the model.
        sample: inputs for a check of the trace; None for no check.

    Raises: StrategyRefused: the model cannot be traced, or not be cut into so many stages.
    """
    coarse = trace_model(model, num_inputs, wrap_units, sample)
    if len(cut_points(coarse.training, None)) + 1 >= num_stages:
        return coarse
    free_trace(model, coarse.added)
    fine = trace_model(model, num_inputs, frozenset(), sample)
    num_places = len(cut_points(fine.training, None))
    if num_places + 1 < num_stages:
        raise StrategyRefused(
            f"pipeline: {num_stages} stages need {num_stages - 1} places to cut the model, and its "
            f"forward pass has {num_places} between steps. Use fewer stages."
        )
    return fine


def plan(
    world: Axis,
    model: nn.Module,
    graph: Traced,
    request: PlanRequest,
    sample: tuple[Any, ...] | None,
) -> StagePlan:
    """Choose the cuts on rank 0 and return them on every rank. Collective over the world.

    Args: sample: a few samples, on which steps are measured; None to count parameters.

    Raises: StrategyRefused, on every rank: a name is no place to cut, there are too few places, or
        a colocation cannot be found.
    """
    sent = ""
    if world.rank == 0:
        try:
            sent = json.dumps(_plan(model, graph, request, sample)._asdict())
        except StrategyRefused as refusal:
            sent = json.dumps({"refusal": str(refusal)})
    received = json.loads(world.broadcast_str(sent))
    if "refusal" in received:
        raise StrategyRefused(received["refusal"])
    return StagePlan(**received)


def full_model(model: nn.Module, graph: Traced, stage_starts: Sequence[int]) -> FullModel:
    """Describe a model with its stages.

    Args: stage_starts: first steps of stages 1, 2, ...; empty for one stage.
    """
    graphs = (graph.training, graph.evaluating)
    steps = (steps_of(graph.training), steps_of(graph.evaluating))
    return FullModel(model, graphs, steps, stage_starts)


def split_counts(graph: fx.Graph, colocations: Sequence[Colocation]) -> list[int]:
    """Count for each place how many colocations a cut there would separate.

          steps        flatten │ up │ gelu │ down │ norm │ head │ softmax ──> output
          colocations            └──── pair ────┘          └── through output ───────
          places       1         2    3      4      5      6      counts: 0 0 1 1 0 0 1 ...

    Returns: len(steps) + 1 counts, from the place before step 0 to that after the last step.
    """
    steps = steps_of(graph)
    counts = [0] * (len(steps) + 1)
    for names, through_output in colocations:
        calls = [
            index
            for index, step in enumerate(steps)
            if step.op == "call_module" and _contains_any(str(step.target), names)
        ]
        last = len(steps) - 1 if through_output else max(calls)
        for place in range(min(calls) + 1, last + 1):
            counts[place] += 1
    return counts


def _plan(
    model: nn.Module, graph: Traced, request: PlanRequest, sample: tuple[Any, ...] | None
) -> StagePlan:
    training = graph.training
    colocations: list[Colocation] = []
    if not request.cuts:
        single_stage = full_model(model, graph, [])
        for find in request.colocations:
            colocations += find(single_stage)
    separations = split_counts(training, colocations)
    profiles = None if sample is None else profile(model, training, sample)
    places = cut_points(training, profiles)
    if len(places) + 1 < request.num_stages:
        raise StrategyRefused(
            f"pipeline: {request.num_stages} stages need {request.num_stages - 1} places to cut "
            f"the model, and there are {len(places)} where only tensors cross. Use fewer stages."
        )
    measured = request.by == "time" and profiles is not None
    costs = _step_costs(model, training, profiles if measured else None)
    crossing = _crossing(training, profiles)
    if request.cuts:
        starts = _named_starts(training, request, places)
    else:
        starts = balanced(costs, crossing, places, request.num_stages, separations)
    return StagePlan(
        stage_starts=starts,
        names=[_name_of(training, start) for start in starts],
        cost_fractions=_cost_fractions(costs, starts),
        measured=measured,
        sent_bytes=[int(crossing[start]) for start in starts] if profiles else [],
    )


def _step_costs(
    model: nn.Module, graph: fx.Graph, profiles: Mapping[fx.Node, StepProfile] | None
) -> list[float]:
    """Return the seconds of each step if they were measured; else its number of parameters."""
    if profiles is not None:
        return [profiles[step].time_s for step in steps_of(graph)]
    counts = parameter_counts(model, graph)
    return [counts[step] for step in steps_of(graph)]


def _crossing(graph: fx.Graph, profiles: Mapping[fx.Node, StepProfile] | None) -> list[float]:
    """Return for each place the bytes that a cut there sends if they were measured; else the
    number of values.
    """
    live = live_across(graph)
    if not profiles:
        return [float(len(values)) for values in live]
    return [float(sum(profiles[value].size_bytes for value in values)) for values in live]


def _cost_fractions(costs: Sequence[float], starts: Sequence[int]) -> list[float]:
    total = sum(costs) or 1.0
    boundaries = [0, *starts, len(costs)]
    return [sum(costs[start:stop]) / total for start, stop in pairwise(boundaries)]


def _named_starts(graph: fx.Graph, request: PlanRequest, places: list[int]) -> list[int]:
    """Return the steps at which the modules of `request.cuts` begin."""
    names = request.cuts.split("/")
    assert len(names) == request.num_stages - 1, "the strategy's options have counted them"
    calls = {
        index: str(step.target)
        for index, step in enumerate(steps_of(graph))
        if step.op == "call_module"
    }
    starts = [_first_call(calls, name, request.cuts) for name in names]
    for name, start in zip(names, starts, strict=True):
        if start not in places:
            raise StrategyRefused(
                f"cuts={request.cuts}: something other than tensors crosses the place before "
                f"{name}. Name another module."
            )
    if starts != sorted(set(starts)):
        raise StrategyRefused(
            f"cuts={request.cuts}: name modules in the order of the forward pass, each once."
        )
    return starts


def _first_call(calls: Mapping[int, str], name: str, cuts: str) -> int:
    """Return the first step that calls the module `name`, or a module inside it."""
    for index, path in calls.items():
        if _is_inside(path, name):
            return index
    raise StrategyRefused(
        f"cuts={cuts}: no step of the model is called '{name}'; "
        f"{did_you_mean(name, set(calls.values()))}"
    )


def _is_inside(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _contains_any(path: str, names: Set[str]) -> bool:
    return any(_is_inside(name, path) for name in names)


def _name_of(graph: fx.Graph, start: int) -> str:
    """Return the path of the first module that a stage calls: functions have no names that a
    user knows.
    """
    for step in steps_of(graph)[start:]:
        if step.op == "call_module":
            return str(step.target)
    return "the end"
