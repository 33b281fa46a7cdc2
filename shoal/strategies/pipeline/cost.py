"""Cost of a pipeline: stages of equal predicted time, a schedule's table, activations between them.

A stage begins with a unit, as in the strategy: units are found by its own rule, and the partition
is that of its own dynamic programming. The times are predicted, where the strategy measures them,
so a cut may lie one unit away.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import nn

from shoal.costs.pass_table import PassTable
from shoal.costs.step_cost import LocalSegment, SentMessage, StepCost
from shoal.costs.work import Affine
from shoal.errors import StrategyRefused
from shoal.strategies.full_model import enclosing
from shoal.strategies.options import PipelineOptions
from shoal.strategies.pipeline.plan import balanced
from shoal.strategies.pipeline.schedules import table
from shoal.strategies.pipeline.units import find_units


def cost(options: PipelineOptions, microbatches: int, step: StepCost) -> StepCost:
    """Return a step whose segments lie in stages.

    Raises:
        StrategyRefused: there are too few units, or a name of `cuts` is none.
        ConfigError: the schedule has no table for so many micro-batches.
    """
    step = replace(step, microbatches=microbatches)
    unit_of = step.once(
        ("pipeline", options.num_stages, options.cuts), lambda: _units_of_segments(options, step)
    )
    starts = [i for i, name in enumerate(unit_of) if i == 0 or unit_of[i - 1] != name]
    sent = [_output(step, step.segments[:start]) for start in starts]
    calls = [unit_of[start] for start in starts]
    first_calls = _first_calls(options, step, calls, [*starts, len(unit_of)], sent)
    firsts = [starts[call] for call in first_calls]
    segments = [
        segment._replace(stage=bisect_right(firsts, index))
        for index, segment in enumerate(step.segments)
    ]
    crossing = {stage: sent[call] for stage, call in enumerate(first_calls, 1)}
    drawn = (options.schedule, options.ranks, microbatches, options.stages)
    passes = step.once(drawn, lambda: table(*drawn))
    step = replace(
        step,
        segments=tuple(_with_sends(_with_ties(step, segments, passes), crossing)),
        passes=passes,
        # Units of other stages are called too, and return absent tensors.
        around_pass=(*step.around_pass, ("pipeline pass", 1), ("pipeline unit", len(calls))),
    )
    ranks = range(options.ranks)
    shares = [sum(p.numel for p in step.parameters_of_rank(rank)) for rank in ranks]
    share = max(shares) / max(step.model.numel, 1)
    return replace(step, optimizer_share=share)


def _first_calls(
    options: PipelineOptions,
    step: StepCost,
    calls: Sequence[str],
    bounds: Sequence[int],
    sent: Sequence[float],
) -> list[int]:
    """Return the calls of units that begin stages 1, 2, ...

    Args:
        calls: unit of each call. bounds: first segment of each call, and the number of segments.
        sent: bytes that a cut before each call sends.
    """
    if options.cuts:
        found = {
            name: [i for i, call in enumerate(calls) if enclosing(call, [name])]
            for name in options.cut_names
        }
        missing = next((name for name, indices in found.items() if not indices), None)
        if missing is not None:
            raise StrategyRefused(f"cuts={options.cuts}: the function does not call {missing}.")
        return [indices[0] for indices in found.values()]
    places = [*range(1, len(calls))]
    if len(places) < options.num_stages - 1:
        raise StrategyRefused(
            f"pipeline={options.ranks}: {options.num_stages} stages need as many units, and the "
            f"model has {len(calls)}. Use fewer ranks, or ddp."
        )
    seconds = [sum(step.segment_time(s.work, step.samples)) for s in step.segments]
    costs = [sum(seconds[a:b]) for a, b in pairwise(bounds)]
    return balanced(costs, [*sent, 0.0], places, options.num_stages)


def _units_of_segments(options: PipelineOptions, step: StepCost) -> list[str]:
    """Return the unit of each segment; code between units belongs to the unit before it."""
    names = [*find_units(step.module, options.num_stages, named=options.cut_names)]
    if not names:
        raise StrategyRefused(
            f"pipeline={options.ranks}: the model has no modules inside that stages could begin "
            "with. Use ddp."
        )
    found: list[str] = []
    for segment in step.segments:
        unit = enclosing(segment.work.path, names)
        found.append(unit if unit is not None else (found[-1] if found else names[0]))
    return found


def _output(step: StepCost, before: Sequence[LocalSegment]) -> float:
    """Return the bytes of the output of the last module before a cut, for one micro-batch."""
    sizes = (segment.work.output_bytes.at(step.samples) for segment in reversed(before))
    return next((size for size in sizes if size), 0.0)


def _with_ties(
    step: StepCost, segments: list[LocalSegment], passes: PassTable
) -> list[LocalSegment]:
    """Let a rank that reads a tied parameter hold a copy, if its first stage is another rank's."""
    ties = step.once("tied parameters", lambda: [*_ties(step.module)])
    rank_of = {stage: rank for rank, stages in enumerate(passes.stages) for stage in stages}
    result = list(segments)
    for name, reader in ties:
        for index, segment in enumerate(segments):
            if segment.work.path == reader:
                home = next((s for s in segments for p in s.parameters if p.name == name), segment)
                if rank_of[home.stage] != rank_of[segment.stage]:
                    (copy,) = (p for p in home.parameters if p.name == name)
                    result[index] = segment._replace(parameters=(*segment.parameters, copy))
                break
    return result


def _ties(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (first name, module that reads it too) of each tied parameter."""
    first_names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            yield first, name.rpartition(".")[0]


def _with_sends(segments: Sequence[LocalSegment], crossing: dict[int, float]) -> list[LocalSegment]:
    """Send activations behind each stage's last segment, and gradients behind its first."""
    result = list(segments)
    for index, segment in enumerate(segments):
        behind = segments[index + 1].stage if index + 1 < len(segments) else segment.stage
        if behind > segment.stage:
            message = SentMessage("send", crossing[behind], "pipeline")
            result[index] = segment._replace(after_forward=(*segment.after_forward, message))
            following = result[index + 1]
            result[index + 1] = following._replace(
                after_backward=(*following.after_backward, message),
                # What was received, and the copy that the stage may write into.
                kept=following.kept + Affine(2 * crossing[behind], 0.0),
            )
    return result
