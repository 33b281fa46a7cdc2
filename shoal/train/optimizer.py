"""The optimizer of a job, AdamW8bit or any of torch.optim, with its parameter groups.

The factor of its learning rate is a pure function of the step: it has no state to save.

factor  1 ┤      ╭──╮           warm-up is linear in steps and multiplies the shape:
          │     ╱    ╲          constant, cosine (Loshchilov & Hutter, 2017) or steps
          │    ╱      ╲
      0.1 ┤   ╱        ╲___
          └───┴────────────
           warm-up       end
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from shoal.config.job import OptimizerConfig as Config
from shoal.config.job import ScheduleConfig
from shoal.errors import ConfigError, did_you_mean, raise_problems
from shoal.platform.torch_private.module_state import NormBase

NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def scaled_rate(config: Config, batch_size: int) -> float:
    """Return the base learning rate: `lr * batch_size / reference_batch` (Goyal et al., 2017)."""
    if not config.reference_batch:
        return config.lr
    return config.lr * batch_size / config.reference_batch


def build(config: Config, model: nn.Module, batch_size: int) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names, over all trainable parameters of `model`.

    Raises:
        ConfigError: arguments that it does not take; all problems at once.
    """
    if config.name == "AdamW8bit":
        from shoal.optim import AdamW8bit  # imports torchao, an extra

        kind: Any = AdamW8bit
    else:
        kind = getattr(torch.optim, config.name)  # `job_precheck` has seen the name
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "params"}
    arguments: dict[str, Any] = {
        "lr": scaled_rate(config, batch_size),
        "weight_decay": config.weight_decay,
    }
    if config.name == "SGD":
        arguments["momentum"] = config.momentum
    if config.nesterov:
        arguments["nesterov"] = True
    # An optimizer may lack weight decay, as long as none is requested.
    if config.weight_decay == 0 and "weight_decay" not in known:
        del arguments["weight_decay"]
    arguments |= config.options
    problems = [
        f"optimizer: {config.name} takes no '{name}'; {did_you_mean(name, known)}"
        for name in arguments.keys() - known
    ]
    raise_problems(sorted(problems))
    try:
        optimizer: torch.optim.Optimizer = kind(_groups(config, model), **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {config.name} refuses its arguments: {error}") from error
    return optimizer


def _groups(config: Config, model: nn.Module) -> list[dict[str, Any]]:
    """Return one group, or two if biases and norm layers get no weight decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.decay_norm_and_bias or not config.weight_decay:
        return [{"params": trainable}]
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    undecayed = {id(p) for module in norms for p in module.parameters(recurse=False)}
    undecayed |= {
        id(p) for name, p in model.named_parameters() if name.rpartition(".")[2].startswith("bias")
    }
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if id(p) not in undecayed]},
        {"params": [p for p in trainable if id(p) in undecayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def factor(schedule: ScheduleConfig, epochs: float, progress: float) -> float:
    """Return the factor of the base learning rate in one step.

    Args:
        epochs: epochs before this step, with the fraction of the present epoch.
        progress: steps before this step, as a fraction of all steps of the run.
    """
    shape = 1.0
    if schedule.name == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))  # from 1 to 0
        shape = schedule.final_factor + (1 - schedule.final_factor) * cosine
    elif schedule.name == "step":
        passed = sum(epochs >= milestone for milestone in schedule.milestones)
        shape = float(schedule.gamma**passed)
    if epochs >= schedule.warmup_epochs:
        return shape
    # Linear from `warmup_factor` to 1 (Goyal et al., 2017).
    start = schedule.warmup_factor
    return (start + (1 - start) * epochs / schedule.warmup_epochs) * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, multiplier: float) -> float:
    """Set every group to its base rate times `multiplier`. Return the rate of the first group."""
    # `initial_lr` is the base rate, as in torch.optim.lr_scheduler.
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier
    return float(optimizer.param_groups[0]["lr"])
