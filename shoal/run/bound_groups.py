"""The groups of optimizers that are bound to what one rank owns, with the parameters that the
models show: where a strategy has made shards, an optimizer holds these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

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

    def shown(self, parameter: Tensor) -> Tensor:
        """Return what the model shows for a parameter of an optimizer."""
        return self._shown.get(id(parameter), parameter)

    def of(self, optimizer: Optimizer) -> Groups:
        """Return the groups of an optimizer, with what the models show."""
        return [
            [self.shown(parameter) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]

    def show(self, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers the groups that `of` returns. Their state stays where it is."""
        for optimizer in optimizers:
            for group, shown in zip(optimizer.param_groups, self.of(optimizer), strict=True):
                group["params"] = shown
