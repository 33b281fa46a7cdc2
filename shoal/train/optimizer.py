"""The optimizer of a job, AdamW8bit or any of torch.optim: its learning rate, and what weight
decay spares.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shoal.config.job import OptimizerConfig as Config
from shoal.errors import ConfigError, did_you_mean
from shoal.platform.torch_private.module_state import NormBase

NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def scaled_rate(config: Config, batch_size: int) -> float:
    """The base learning rate for this batch: `lr * batch_size / reference_batch` (Goyal et al.,
    2017).
    """
    return config.lr * batch_size / config.reference_batch if config.reference_batch else config.lr


def build(config: Config, model: nn.Module, batch_size: int) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over all trainable parameters of `model`.

    Raises: ConfigError: no such optimizer, or arguments that it does not take; all problems at
    once."""
    kind = _kind(config.name)
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "params"}
    arguments: dict[str, Any] = {
        "lr": scaled_rate(config, batch_size),
        "weight_decay": config.weight_decay,
    }
    if config.name == "SGD":
        arguments["momentum"] = config.momentum
    if config.nesterov:
        arguments["nesterov"] = True
    # An optimizer without weight decay is fine as long as none was asked for.
    if config.weight_decay == 0 and "weight_decay" not in known:
        del arguments["weight_decay"]
    arguments |= config.options
    problems = [
        f"optimizer: {config.name} takes no '{name}'; {did_you_mean(name, known)}"
        for name in arguments.keys() - known
    ]
    if problems:
        raise ConfigError(sorted(problems))
    try:
        optimizer: torch.optim.Optimizer = kind(_groups(config, model), **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"optimizer: {config.name} refuses its arguments: {error}"]) from error
    return optimizer


def _kind(name: str) -> Any:
    names = {n for n, kind in vars(torch.optim).items() if inspect.isclass(kind)} - {
        "Optimizer",
        "LBFGS",
    }
    if name == "LBFGS":
        raise ConfigError(
            [
                "optimizer.name: LBFGS evaluates the loss several times in a step; a training loop "
                "cannot."
            ]
        )
    if name == "AdamW8bit":
        from shoal.optim.adamw8bit import AdamW8bit  # torchao, which it needs, is an extra

        return AdamW8bit
    if name not in names:
        known = names | {"AdamW8bit"}
        raise ConfigError(
            [f"optimizer.name: '{name}' is not in torch.optim; {did_you_mean(name, known)}"]
        )
    return getattr(torch.optim, name)


def _groups(config: Config, model: nn.Module) -> list[dict[str, Any]]:
    """One group, or two where biases and norm layers are spared from weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.decay_norm_and_bias or not config.weight_decay:
        return [{"params": trained}]
    spared = _norms_and_biases(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) not in spared]},
        {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _norms_and_biases(model: nn.Module) -> set[int]:
    """The `id` of each parameter of a norm layer, and of each bias."""
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    of_norms = {id(p) for module in norms for p in module.parameters(recurse=False)}
    return of_norms | {
        id(p) for name, p in model.named_parameters() if name.rpartition(".")[2].startswith("bias")
    }
