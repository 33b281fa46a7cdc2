"""The groups of optimizers that are bound to what one rank owns, with the parameters of all ranks.

model on every rank      0.weight (absent)   2.weight
optimizer.param_groups                       2.weight        what this rank of a pipeline steps
BoundGroups.of           0.weight            2.weight        the same on every rank

Where a strategy has made shards, an optimizer holds these; `of` returns what the model shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.strategies.full_model import given_up_params

Groups = list[list[Tensor]]


class BoundGroups:
    """Remembers the groups of optimizers while strategies are applied.

    Before that, and of optimizers that are not bound, groups are as their optimizer has them.
    """

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Optimizer, Groups] = WeakKeyDictionary()
        self._owned: dict[int, Tensor] = {}
        self._shown: dict[int, Tensor] = {}
        self._known: dict[int, Tensor] = {}

    def note(
        self,
        optimizers: Sequence[Optimizer],
        names: Sequence[list[list[str]]],
        root: nn.Module,
        owned: Mapping[str, nn.Parameter],
    ) -> None:
        """Note what optimizers were bound to.

        Args:
            names: for each optimizer and group, those of its parameters. Frozen ones have left it.
            root: with the parameters that the models show.
            owned: this rank's parameters, by name.
        """
        shown = dict(root.named_parameters())
        self._owned = {id(parameter): parameter for parameter in owned.values()}
        self._shown = {id(owned[name]): shown[name] for name in owned if name in shown}
        for parameter in shown.values():
            self._shown |= {id(each): parameter for each in given_up_params(parameter)}
        self._groups = WeakKeyDictionary()
        for optimizer, groups in zip(optimizers, names, strict=True):
            self._groups[optimizer] = [
                [shown[name] for name in group if shown[name].requires_grad] for group in groups
            ]
        self._known = {id(p): p for p in shown.values()}

    def forget(self) -> None:
        """Forget all groups: the optimizers hold whole parameters again."""
        self._groups = WeakKeyDictionary()
        self._owned, self._shown, self._known = {}, {}, {}

    def replaced(self, root: nn.Module) -> list[str]:
        """Return the names of trained parameters of `root` that were not there when optimizers were
        bound, as after a layer was replaced.
        """
        named = root.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in self._known]

    def shown(self, parameter: Tensor) -> Tensor:
        """Return what the model shows for a parameter of an optimizer."""
        return self._shown.get(id(parameter), parameter)

    def of(self, optimizer: Optimizer) -> Groups:
        """Return the groups of an optimizer, with the parameters that other ranks own."""
        bound = self._groups.get(optimizer, [])
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            here = [self.shown(parameter) for parameter in group["params"]]
            before = bound[index] if index < len(bound) else []
            groups.append(self._joined(before, here))
        return groups

    def show(self, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers the groups that `of` returns. Their state stays where it is."""
        for optimizer in optimizers:
            for group, shown in zip(optimizer.param_groups, self.of(optimizer), strict=True):
                group["params"] = shown

    def _joined(self, before: list[Tensor], here: list[Tensor]) -> list[Tensor]:
        """Return the present parameters of a group, and those of other ranks in their places.

        Args: before: those that the group was bound with, of all ranks.
        """
        owned = {id(self.shown(parameter)) for parameter in self._owned.values()}
        present = {id(parameter) for parameter in here}
        if all(id(p) in present or id(p) in owned for p in before):
            return here
        kept = [p for p in before if id(p) in present or id(p) not in owned]
        known = {id(p) for p in kept}
        return kept + [p for p in here if id(p) not in known]
