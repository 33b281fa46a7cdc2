"""Cost of activation checkpointing: a unit keeps no more than its output.

kept     x0 │ x1 │ x2                   outputs of the units, each the input of the next
again    all activations of one unit, beside what its backward pass needs
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from shoal.costs.step_cost import LocalSegment, StepCost
from shoal.costs.work import NOTHING
from shoal.errors import StrategyRefused
from shoal.strategies.options import RecomputeOptions
from shoal.strategies.wrap_units import innermost, units


def cost(options: RecomputeOptions, step: StepCost) -> StepCost:
    """Return a step in which every k-th unit is computed again.

    Raises: StrategyRefused: the model has no units.
    """
    found = step.once(
        ("units", options.unit), lambda: [*innermost(units(step.module, options.unit))]
    )
    names = found[:: options.every]
    if not names:
        raise StrategyRefused("recompute: the model has no Sequential or ModuleList of blocks.")
    segments: list[LocalSegment] = []
    for name, run in groupby(step.segments, lambda segment: _unit_of(segment, names)):
        group = [*run]
        segments += _recomputed(group) if name else group
    return replace(step, segments=tuple(segments))


def _recomputed(run: list[LocalSegment]) -> list[LocalSegment]:
    """Return the segments of one unit, which keeps its output for the unit behind it.

    The forward pass runs without a graph, so it keeps nothing inside the unit. The output is not
    computed again: a checkpoint stops when it has found what the backward pass needs.
    """
    output = run[-1].work.output_bytes
    result = []
    again = NOTHING
    for index, segment in enumerate(run):
        is_last = index == len(run) - 1
        again = again + segment.kept
        if is_last:
            again = again + output.scaled(-1)
        result.append(
            segment._replace(
                again=segment.again + 1,
                kept=output if is_last else NOTHING,
                backward_extra=again + segment.backward_extra,
                gradient_extra=again + segment.gradient_extra,
            )
        )
    return result


def _unit_of(segment: LocalSegment, names: list[str]) -> str:
    path = segment.work.path
    return next((name for name in names if path == name or path.startswith(f"{name}.")), "")
