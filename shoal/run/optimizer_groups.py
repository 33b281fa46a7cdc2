"""The groups of optimizers by the names of parameters.

Every trainable parameter must be in exactly one group of one optimizer: one that is in none is
never stepped, without any error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.run.bound_groups import BoundGroups

Value = TypeVar("Value")


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def group_names(
    optimizers: Sequence[Optimizer], root: nn.Module, bound: BoundGroups
) -> list[list[list[str]]]:
    """Return for each optimizer, for each of its groups, the names of its parameters.

    Args: bound: knows the groups of optimizers that hold this rank's parameters only.

    Raises:
        UsageError: a trainable parameter is not in exactly one group, or a group has a parameter
            of no prepared model.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    groups = [bound.of(optimizer) for optimizer in optimizers]
    params = [parameter for of_one in groups for group in of_one for parameter in group]
    problems = list(_problems_of_groups(root, names, params))
    if problems:
        raise UsageError("\n".join(problems))
    return [[[names[id(p)] for p in group] for group in of_one] for of_one in groups]


def owned_by(groups: Sequence[Sequence[str]], owned: Mapping[str, Value]) -> dict[str, Value]:
    """Return the owned parameters that one optimizer steps.

    Args: groups: names of its parameters, group by group.
    """
    return {name: owned[name] for names in groups for name in names if name in owned}


def _problems_of_groups(
    root: nn.Module, names: Mapping[int, str], params: Sequence[Tensor]
) -> Iterator[str]:
    """Yield a sentence if trainable parameters are missing, are there twice, or are foreign.

    Args:
        names: names of the models' parameters by their `id`.
        params: the parameters in all groups of all optimizers.
    """
    counts = Counter(id(parameter) for parameter in params)
    missing = [n for n, p in root.named_parameters() if p.requires_grad and id(p) not in counts]
    if missing:
        yield (
            f"{listed(missing)}: trainable, but in no group of the optimizer. Build the optimizer "
            "after the last change to the model, add them to a group, or freeze them with "
            "requires_grad_(False)."
        )
    twice = [names[key] for key, count in counts.items() if count > 1 and key in names]
    if twice:
        yield f"{listed(twice)}: in more than one group of the optimizer; keep one."
    foreign = sum(id(parameter) not in names for parameter in params)
    if foreign:
        yield (
            f"{foreign} of the optimizer's {len(params)} parameters do not belong to the model. "
            "Was the model copied, moved or wrapped after the optimizer was built? Build it from "
            "the parameters of this model. A parameter of no model, such as a learned weight of a "
            "loss, goes into a module of its own, which run.prepare is given as well."
        )


def listed(names: list[str], max_names: int = 5) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more
