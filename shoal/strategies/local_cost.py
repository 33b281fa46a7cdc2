"""Cost of local SGD and DiLoCo: each rank steps alone, and a sync round every H steps."""

from __future__ import annotations

from dataclasses import replace

from shoal.costs.step_cost import SentMessage, StepCost, total
from shoal.errors import StrategyRefused
from shoal.strategies.options import DilocoOptions, LocalOptions


def cost(options: LocalOptions, step: StepCost) -> StepCost:
    """Return a step with 1/H of a sync round. DiLoCo holds two models more.

    Raises: StrategyRefused: beside tensor or pipeline.
    """
    if step.layout.data < step.layout.world:
        raise StrategyRefused(
            f"strategy {options.name} averages whole models, and beside tensor and pipeline a rank "
            "has a part of one. Use ddp."
        )
    size = total(step.parameters_of_rank(0))
    held = 2 * size if isinstance(options, DilocoOptions) else 0.0
    if step.layout.data == 1:
        return replace(step, always_held={0: held}, is_exact=False)
    sync_round = SentMessage("all_reduce", size, share=1 / options.every)
    return replace(step, always_held={0: held}, after_step={0: (sync_round,)}, is_exact=False)
