"""Where a model is cut, and what is said about it: agreed on by all ranks, measured by one of
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx, nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused, did_you_mean
from shoal.strategies.colocation import ColocationRequest
from shoal.strategies.full_model import FullModel
from shoal.strategies.pipeline.balance import balanced
from shoal.strategies.pipeline.fx_trace import Traced, free_trace, trace_model
from shoal.strategies.pipeline.separations import split_counts
from shoal.strategies.pipeline.steps import (
    StepProfile,
    cut_points,
    live_across,
    profile,
    sizes,
    steps_of,
)


class StagePlan(NamedTuple):
    """The places of a model's cuts.

    Attributes:
        begins: steps that stages 1, 2, ... begin with.
        names: what these steps are called.
        shares: of the whole, for each stage: of time or of parameters.
        measured: shares are of time.
        sent_bytes: over each cut, for the rows of the sample; empty where nothing was measured.
    """

    stage_starts: list[int]
    names: list[str]
    cost_fractions: list[float]
    measured: bool
    sent_bytes: list[int]


def trace_for(
    model: nn.Module,
    num_stages: int,
    whole: Set[str],
    num_inputs: int,
    sample: tuple[Any, ...] | None,
) -> Traced:
    """The model's graph, with its units in one piece where enough places to cut are left.

    Raises: StrategyRefused: the model cannot be traced, or not be cut in so many stages.
    """
    coarse = trace_model(model, num_inputs, whole, sample)
    if len(cut_points(coarse.training, None)) + 1 >= num_stages:
        return coarse
    free_trace(model, coarse.added)
    fine = trace_model(model, num_inputs, frozenset(), sample)
    found = len(cut_points(fine.training, None))
    if found + 1 < num_stages:
        raise StrategyRefused(
            f"pipeline: {num_stages} stages need {num_stages - 1} places to cut the model, and its "
            "forward pass has "
            f"{found} between steps. Use fewer stages."
        )
    return fine


def plan(
    world: Axis,
    model: nn.Module,
    graph: Traced,
    num_stages: int,
    by: str,
    cuts: str,
    sample: tuple[Any, ...] | None,
    wishes: Sequence[ColocationRequest] = (),
) -> StagePlan:
    """Where to cut. Collective over the world: the first rank measures.

    Args: by: "time" or "parameters". cuts: names of the modules that begin stages but the first,
        with / between them; empty to balance. sample: a few samples, to be measured on; None for
        parameters. wishes: what is to lie in one stage; cuts by name go their own way.

    Raises: StrategyRefused: names that are no place to cut, or too few places; a wish cannot be
    told."""
    said = ""
    if world.rank == 0:
        try:
            said = json.dumps(_plan(model, graph, num_stages, by, cuts, sample, wishes)._asdict())
        except StrategyRefused as refusal:  # to be raised on every rank
            said = json.dumps({"refusal": str(refusal)})
    found = json.loads(world.broadcast_str(said))
    if "refusal" in found:
        raise StrategyRefused(found["refusal"])
    return StagePlan(**found)


def full_model(model: nn.Module, graph: Traced, begins: Sequence[int]) -> FullModel:
    """The model with the stages that begin with these steps.

    Args: begins: steps that stages 1, 2, ... begin with; none for one stage.
    """
    graphs = (graph.training, graph.evaluating)
    return FullModel(model, graphs, (steps_of(graph.training), steps_of(graph.evaluating)), begins)


def _plan(
    model: nn.Module,
    graph: Traced,
    num_stages: int,
    by: str,
    cuts: str,
    sample: tuple[Any, ...] | None,
    wishes: Sequence[ColocationRequest],
) -> StagePlan:
    one_stage = full_model(model, graph, [])
    wanted = [] if cuts else [colocation for wish in wishes for colocation in wish(one_stage)]
    parts = split_counts(graph.training, wanted)
    seen = None if sample is None else profile(model, graph.training, sample)
    where = cut_points(graph.training, seen)
    if len(where) + 1 < num_stages:
        raise StrategyRefused(
            f"pipeline: {num_stages} stages need {num_stages - 1} places to cut the model, and "
            f"there are {len(where)} "
            "where only tensors cross. Use fewer stages."
        )
    measured = by == "time" and seen is not None
    costs = _costs(model, graph.training, seen if measured else None)
    sent = _sent(graph.training, seen)
    begins = (
        _named(graph, cuts, num_stages, where)
        if cuts
        else balanced(costs, sent, where, num_stages, parts)
    )
    names = [_called(graph, place) for place in begins]
    sent_bytes = [int(sent[place]) for place in begins] if seen else []
    return StagePlan(begins, names, _shares(costs, begins), measured, sent_bytes)


def _costs(
    model: nn.Module, graph: fx.Graph, seen: Mapping[fx.Node, StepProfile] | None
) -> list[float]:
    """Seconds that each step takes where that was observed; else numbers of its parameters."""
    numbers = (
        sizes(model, graph)
        if seen is None
        else {step: seen[step].time_s for step in steps_of(graph)}
    )
    return [numbers[step] for step in steps_of(graph)]


def _sent(graph: fx.Graph, seen: Mapping[fx.Node, StepProfile] | None) -> list[float]:
    """Bytes that a cut at each place would send where that was observed; else numbers of values."""
    values = live_across(graph)
    if not seen:
        return [float(len(crossed)) for crossed in values]
    return [float(sum(seen[value].size_bytes for value in crossed)) for crossed in values]


def _shares(costs: Sequence[float], begins: Sequence[int]) -> list[float]:
    """The part of all costs that each stage has."""
    total = sum(costs) or 1.0
    return [sum(costs[begin:end]) / total for begin, end in pairwise([0, *begins, len(costs)])]


def _named(graph: Traced, cuts: str, num_stages: int, where: list[int]) -> list[int]:
    steps = steps_of(graph.training)
    names = cuts.split("/")
    assert len(names) == num_stages - 1, "the strategy's options have counted them"
    begins = []
    for name in names:
        found = [
            i
            for i, step in enumerate(steps)
            if _is_inside(str(step.target), name) and step.op == "call_module"
        ]
        if not found:
            known = {str(step.target) for step in steps if step.op == "call_module"}
            raise StrategyRefused(
                f"cuts={cuts}: no step of the model is called '{name}'; {did_you_mean(name, known)}"
            )
        begins.append(found[0])
    wrong = [name for name, begin in zip(names, begins, strict=True) if begin not in where]
    if wrong or begins != sorted(set(begins)):
        raise StrategyRefused(
            f"cuts={cuts}: "
            + (
                f"something other than tensors crosses the place before {wrong[0]}. Name another "
                "module."
                if wrong
                else "name modules in the order of the forward pass, each once."
            )
        )
    return begins


def _is_inside(target: str, name: str) -> bool:
    return target == name or target.startswith(f"{name}.")


def _called(graph: Traced, place: int) -> str:
    """The step that begins a stage, or the module after it where the step is a mere function."""
    for step in steps_of(graph.training)[place:]:
        if step.op == "call_module":
            return str(step.target)
    return "the end"
