"""The learning rate as a pure function of where the run stands; nothing to save, nothing to step
twice.

 factor  1 ┤      ╭──╮            warm-up is linear in steps and multiplies the shape:
           │     ╱    ╲            constant, cosine (Loshchilov & Hutter, 2017) or steps
           │    ╱      ╲
0.1 ┤   ╱        ╲___
    └───┴────────────────
      warm-up           end
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from shoal.config.job import ScheduleConfig


def factor(schedule: ScheduleConfig, epochs: float, progress: float) -> float:
    """What the base learning rate is multiplied by in one step.

    Args:
        epochs: epochs done before this step, with the fraction of the present one.
        progress: steps done before this step, as a share of all steps of the run.
    """
    return _warmup(schedule, epochs) * _shape(schedule, epochs, progress)


def _warmup(schedule: ScheduleConfig, epochs: float) -> float:
    """Linear from `warmup_factor` to 1 (Goyal et al., 2017)."""
    if epochs >= schedule.warmup_epochs:
        return 1.0
    return schedule.warmup_factor + (1 - schedule.warmup_factor) * epochs / schedule.warmup_epochs


def _shape(schedule: ScheduleConfig, epochs: float, progress: float) -> float:
    if schedule.name == "cosine":
        falling = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return schedule.final_factor + (1 - schedule.final_factor) * falling
    if schedule.name == "step":
        return float(
            schedule.gamma ** sum(epochs >= milestone for milestone in schedule.milestones)
        )
    return 1.0


def set_learning_rate(optimizer: Optimizer, multiplier: float) -> float:
    """Set every group to its own base rate times `multiplier`; returns the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier
    return float(optimizer.param_groups[0]["lr"])
