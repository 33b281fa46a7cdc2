"""The learning rate as a pure function of the step: it has no state to save.

factor  1 ┤      ╭──╮           warm-up is linear in steps and multiplies the shape:
          │     ╱    ╲          constant, cosine (Loshchilov & Hutter, 2017) or steps
          │    ╱      ╲
      0.1 ┤   ╱        ╲___
          └───┴────────────
           warm-up       end
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from shoal.config.job import ScheduleConfig


def factor(schedule: ScheduleConfig, epochs: float, progress: float) -> float:
    """Return the factor of the base learning rate in one step.

    Args:
        epochs: epochs before this step, with the fraction of the present epoch.
        progress: steps before this step, as a fraction of all steps of the run.
    """
    return _warmup(schedule, epochs) * _shape(schedule, epochs, progress)


def _warmup(schedule: ScheduleConfig, epochs: float) -> float:
    """Return the factor of warm-up: linear from `warmup_factor` to 1 (Goyal et al., 2017)."""
    if epochs >= schedule.warmup_epochs:
        return 1.0
    return schedule.warmup_factor + (1 - schedule.warmup_factor) * epochs / schedule.warmup_epochs


def _shape(schedule: ScheduleConfig, epochs: float, progress: float) -> float:
    if schedule.name == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))  # from 1 to 0
        return schedule.final_factor + (1 - schedule.final_factor) * cosine
    if schedule.name == "step":
        passed = sum(epochs >= milestone for milestone in schedule.milestones)
        return float(schedule.gamma**passed)
    return 1.0


def set_learning_rate(optimizer: Optimizer, multiplier: float) -> float:
    """Set every group to its base rate times `multiplier`. Return the rate of the first group."""
    # `initial_lr` is the base rate, as in torch.optim.lr_scheduler.
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier
    return float(optimizer.param_groups[0]["lr"])
