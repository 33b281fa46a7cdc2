"""The optimizer of a job, AdamW8bit or any of torch.optim, with its parameter groups.

The factor of its learning rate is a pure function of the step: it has no state to save.

factor  1 ┤      ╭──╮           warm-up is linear in steps and multiplies the shape:
          │     ╱    ╲          constant, cosine (Loshchilov & Hutter, 2017), steps,
          │    ╱      ╲         or that of a scheduler of torch
      0.1 ┤   ╱        ╲___
          └───┴────────────
           warm-up       end
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.config.job import OWN_SCHEDULES, Job, ScheduleConfig
from shoal.config.job import OptimizerConfig as Config
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


class RateSchedule:
    """The factor of the base learning rate in each step of a run.

    Args: epoch_steps: optimizer steps of each epoch.

    Attributes: total_steps: optimizer steps of the run.

    Raises: ConfigError: a class of torch.optim.lr_scheduler refuses its options, or so many steps.
    """

    def __init__(self, job: Job, epoch_steps: Sequence[int]) -> None:
        self.total_steps = min(sum(epoch_steps), job.train.max_steps or sum(epoch_steps))
        self._config = job.schedule
        self._factors: list[float] = []
        if job.schedule.name not in OWN_SCHEDULES:
            rate = scaled_rate(job.optimizer, job.train.batch_size)
            count = self.total_steps if job.schedule.interval == "step" else len(epoch_steps)
            self._factors = _factors_of_torch(job.schedule, rate, count)

    def factor(self, epochs: float, step: int) -> float:
        """Return the factor in one step.

        Args:
            epochs: epochs before this step, with the fraction of the present epoch.
            step: steps before this step.
        """
        config, shape = self._config, self._shape(epochs, step)
        steps, warmup = (
            (step, config.warmup_steps) if config.warmup_steps else (epochs, config.warmup_epochs)
        )
        if steps >= warmup:
            return shape
        # Linear from `warmup_factor` to 1 (Goyal et al., 2017).
        start = config.warmup_factor
        return (start + (1 - start) * steps / warmup) * shape

    def _shape(self, epochs: float, step: int) -> float:
        config = self._config
        if self._factors:
            return self._factors[step if config.interval == "step" else int(epochs)]
        if config.name == "cosine":
            cosine = 0.5 * (1 + math.cos(math.pi * min(step / self.total_steps, 1.0)))  # 1 to 0
            return config.final_factor + (1 - config.final_factor) * cosine
        passed = sum(epochs >= milestone for milestone in config.milestones)
        return float(config.gamma**passed) if config.name == "step" else 1.0


def _factors_of_torch(config: ScheduleConfig, rate: float, count: int) -> list[float]:
    """Return the factors before each of so many steps of a scheduler of torch.

    All at once, so that a resumed run need not have its state.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    rates = list[float]()
    try:
        scheduler = getattr(torch.optim.lr_scheduler, config.name)(optimizer, **config.options)
        optimizer.step()  # else torch warns that the scheduler steps first
        while len(rates) < count:
            rates.append(float(optimizer.param_groups[0]["lr"]))
            if not 0 <= rates[-1] < math.inf:
                raise ValueError(f"the rate is {rates[-1]}")
            if len(rates) < count:
                scheduler.step()
    except Exception as error:
        raise ConfigError(
            f"schedule.options: {config.name} has no rate for {config.interval} {len(rates)} of "
            f"{count}: {error}"
        ) from error
    return [each / rate for each in rates]


def set_learning_rate(optimizer: torch.optim.Optimizer, multiplier: float) -> float:
    """Set every group to its base rate times `multiplier`. Return the rate of the first group."""
    # `initial_lr` is the base rate, as in torch.optim.lr_scheduler.
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier
    return float(optimizer.param_groups[0]["lr"])
