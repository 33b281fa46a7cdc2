"""Where a model is cut, and what is said about it: agreed on by all ranks, measured by one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from torch import nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused, did_you_mean
from shoal.pipeline.balance import balanced
from shoal.pipeline.steps import crossing, observe, places, sizes, steps_of
from shoal.pipeline.together import Wish, parted
from shoal.pipeline.trace import Traced, forget, traced
from shoal.pipeline.uncut import Uncut


class Plan(NamedTuple):
    """The places of a model's cuts.

    Attributes:
        begins: steps that stages 1, 2, ... begin with.
        names: what these steps are called.
        shares: of the whole, for each stage: of time or of parameters.
        measured: shares are of time.
        sent_bytes: over each cut, for the rows of the sample; empty where nothing was measured.
    """

    begins: list[int]
    names: list[str]
    shares: list[float]
    measured: bool
    sent_bytes: list[int]


def trace_for(
    model: nn.Module, num_stages: int, whole: Set[str], num_inputs: int, sample: tuple[Any, ...] | None
) -> Traced:
    """The model's graph, with its units in one piece where enough places to cut are left.

    Raises: StrategyRefused: the model cannot be traced, or not be cut in so many stages.
    """
    coarse = traced(model, num_inputs, whole, sample)
    if len(places(coarse.training, None)) + 1 >= num_stages:
        return coarse
    forget(model, coarse.added)
    fine = traced(model, num_inputs, frozenset(), sample)
    found = len(places(fine.training, None))
    if found + 1 < num_stages:
        raise StrategyRefused(
            f"pipeline: {num_stages} stages need {num_stages - 1} places to cut the model, and its forward pass has "
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
    wishes: Sequence[Wish] = (),
) -> Plan:
    """Where to cut. Collective over the world: the first rank measures.

    Args:
        by: "time" or "parameters".
        cuts: names of the modules that begin stages but the first, with / between them; empty to balance.
        sample: a few samples, to be measured on; None for parameters.
        wishes: what is to lie in one stage; cuts by name go their own way.

    Raises: StrategyRefused: names that are no place to cut, or too few places; a wish cannot be told.
    """
    said = ""
    if world.rank == 0:
        try:
            said = json.dumps(_plan(model, graph, num_stages, by, cuts, sample, wishes)._asdict())
        except StrategyRefused as refusal:  # to be raised on every rank
            said = json.dumps({"refusal": str(refusal)})
    found = json.loads(world.broadcast_text(said))
    if "refusal" in found:
        raise StrategyRefused(found["refusal"])
    return Plan(**found)


def _plan(
    model: nn.Module,
    graph: Traced,
    num_stages: int,
    by: str,
    cuts: str,
    sample: tuple[Any, ...] | None,
    wishes: Sequence[Wish],
) -> Plan:
    one_stage = Uncut(model, (graph.training, graph.evaluating), [])
    wanted = [] if cuts else [together for wish in wishes for together in wish(one_stage)]
    parts = parted(graph.training, wanted)
    steps, values = steps_of(graph.training), crossing(graph.training)
    seen = None if sample is None else observe(model, graph.training, sample)
    where = places(graph.training, seen)
    if len(where) + 1 < num_stages:
        raise StrategyRefused(
            f"pipeline: {num_stages} stages need {num_stages - 1} places to cut the model, and there are {len(where)} "
            "where only tensors cross. Use fewer stages."
        )
    measured = by == "time" and seen is not None
    numbers = {s: seen[s].time_s for s in steps} if measured and seen is not None else sizes(model, graph.training)
    costs = [numbers[step] for step in steps]
    sent = [float(sum(seen[v].size_bytes for v in crossed) if seen else len(crossed)) for crossed in values]
    begins = _named(graph, cuts, num_stages, where) if cuts else balanced(costs, sent, where, num_stages, parts)
    marks = [0, *begins, len(steps)]
    total = sum(costs) or 1.0
    shares = [sum(costs[marks[i] : marks[i + 1]]) / total for i in range(num_stages)]
    sent_bytes = [int(sent[place]) for place in begins] if seen else []
    return Plan(begins, [_called(graph, place) for place in begins], shares, measured, sent_bytes)


def _named(graph: Traced, cuts: str, num_stages: int, where: list[int]) -> list[int]:
    steps = steps_of(graph.training)
    names = cuts.split("/")
    assert len(names) == num_stages - 1, "the strategy's options have counted them"
    begins = []
    for name in names:
        found = [i for i, step in enumerate(steps) if _lies_in(str(step.target), name) and step.op == "call_module"]
        if not found:
            known = {str(step.target) for step in steps if step.op == "call_module"}
            raise StrategyRefused(f"cuts={cuts}: no step of the model is called '{name}'; {did_you_mean(name, known)}")
        begins.append(found[0])
    wrong = [name for name, begin in zip(names, begins, strict=True) if begin not in where]
    if wrong or begins != sorted(set(begins)):
        raise StrategyRefused(
            f"cuts={cuts}: "
            + (
                f"something other than tensors crosses the place before {wrong[0]}. Name another module."
                if wrong
                else "name modules in the order of the forward pass, each once."
            )
        )
    return begins


def _lies_in(target: str, name: str) -> bool:
    return target == name or target.startswith(f"{name}.")


def _called(graph: Traced, place: int) -> str:
    """The step that begins a stage, or the module after it where the step is a mere function."""
    for step in steps_of(graph.training)[place:]:
        if step.op == "call_module":
            return str(step.target)
    return "the end"
