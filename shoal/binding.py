"""Which optimizer group owns which parameter, by name; what an optimizer holds, by name.

Strategies may replace a parameter by a slice of it. An optimizer that still points at the old tensor trains nothing and
says nothing (pytorch#149205), so it is bound again by name, and every trainable parameter must be owned exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import CheckpointError, UsageError

Scalars = dict[str, dict[str, float | int | bool | None]]


def names_in(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each group. Raises UsageError unless each trainable one is in exactly one group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    counts = Counter(id(parameter) for parameter in held)
    lost = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in counts]
    strange = sum(id(parameter) not in names for parameter in held)
    twice = [names[key] for key, count in counts.items() if count > 1 and key in names]
    problems = []
    if lost:
        problems.append(
            f"{_listed(lost)}: trainable, but in no group of the optimizer. Build the optimizer after the last change "
            "to the model, add them to a group, or freeze them with requires_grad_(False)."
        )
    if twice:
        problems.append(f"{_listed(twice)}: in more than one group of the optimizer; keep one.")
    if strange:
        problems.append(
            f"{strange} of the optimizer's {len(held)} parameters do not belong to the model. Was the model copied, "
            "moved or wrapped after the optimizer was built? Build it from the parameters of this model."
        )
    if problems:
        raise UsageError("\n".join(problems))
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def bind(optimizer: Optimizer, groups: list[list[str]], owned: Mapping[str, nn.Parameter]) -> None:
    """Point every group at what this rank owns of it. Frozen parameters drop out: they are never stepped."""
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [owned[name] for name in names if name in owned]
    bound = sum(len(group["params"]) for group in optimizer.param_groups)
    assert bound == len(owned), f"{len(owned)} parameters are owned here, {bound} are in the optimizer"


def optimizer_state(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], Scalars]:
    """What the optimizer has gathered: tensors as `name.key`, plain numbers apart, so that no pickle is needed."""
    tensors: dict[str, Tensor] = {}
    scalars: Scalars = {}
    for name, parameter in owned.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value
            elif value is None or isinstance(value, (bool, int, float)):
                scalars.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} under '{key}' for {name}; "
                    "only tensors and numbers can be saved without pickle."
                )
    return tensors, scalars


def load_optimizer_state(
    optimizer: Optimizer, owned: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], scalars: Scalars
) -> None:
    """The inverse of `optimizer_state`."""
    by_name: dict[str, dict[str, Any]] = {name: dict(values) for name, values in scalars.items()}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition(".")
        by_name.setdefault(name, {})[key] = tensor
    unknown = sorted(set(by_name) - set(owned))
    if unknown:
        raise CheckpointError(f"the checkpoint holds optimizer state of {_listed(unknown)}, which the model lacks.")
    state = optimizer.state_dict()
    index = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state["state"] = {index[id(owned[name])]: values for name, values in by_name.items()}
    with torch.no_grad():
        optimizer.load_state_dict(state)
    # torch casts floating state to the parameter's dtype; some of it, NAdam's mu_product say, has one of its own.
    for name, values in by_name.items():
        held = optimizer.state[owned[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


def group_settings(optimizer: Optimizer) -> list[dict[str, float | int | bool]]:
    """Learning rate and other plain numbers of each group, which a scheduler may have changed."""
    return [
        {key: value for key, value in group.items() if isinstance(value, (bool, int, float))}
        for group in optimizer.param_groups
    ]


def load_group_settings(optimizer: Optimizer, settings: list[dict[str, float | int | bool]]) -> None:
    """The inverse of `group_settings`."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        group.update(saved)


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
