"""The groups of optimizers by the names of parameters.

Every trainable parameter must be in exactly one group of one optimizer: one that is in none is
never stepped, without any error.

Where a strategy has made shards, an optimizer that is bound holds these; `BoundGroups` knows which
parameters the models show for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.strategies.full_model import given_up_params

Groups = list[list[Tensor]]


class BoundGroups:
    """Remembers the groups of optimizers while strategies are applied.

    Before that, and of optimizers that are not bound, groups are as their optimizer has them.
    """

    def __init__(self) -> None:
        self._shown: dict[int, Tensor] = {}
        self._known: dict[int, Tensor] = {}

    def note(self, root: nn.Module, owned: Mapping[str, nn.Parameter]) -> None:
        """Note what optimizers were bound to.

        Args:
            root: with the parameters that the models show.
            owned: this rank's parameters, by name.
        """
        shown = dict(root.named_parameters())
        self._shown = {id(owned[name]): shown[name] for name in owned if name in shown}
        for parameter in shown.values():
            self._shown |= {id(each): parameter for each in given_up_params(parameter)}
        self._known = {id(p): p for p in shown.values()}

    def forget(self) -> None:
        """Forget all groups: the optimizers hold whole parameters again."""
        self._shown, self._known = {}, {}

    def replaced(self, root: nn.Module) -> list[str]:
        """Return the names of trained parameters of `root` that were not there when optimizers were
        bound, as after a layer was replaced.
        """
        named = root.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in self._known]

    def of(self, optimizer: Optimizer) -> Groups:
        """Return the groups of an optimizer, with what the models show."""
        return [
            [self._shown.get(id(parameter), parameter) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]

    def show(self, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers the groups that `of` returns. Their state stays where it is."""
        for optimizer in optimizers:
            for group, shown in zip(optimizer.param_groups, self.of(optimizer), strict=True):
                group["params"] = shown


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
