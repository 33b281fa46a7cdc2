"""SGD whose updates are shared out over the ranks, by hand: each owns every n-th parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.mutants.data_parallel import DataParallel
from tests.mutants.peers import Peers


class ShardedSGD(torch.optim.Optimizer):
    """SGD with momentum. Each rank keeps the momenta of its parameters, and broadcasts these.

    Args: params: of the model. peers: the ranks. All call `step` together.
    """

    lr, momentum, weight_decay = 0.3, 0.9, 0.0

    def __init__(self, params: Iterable[nn.Parameter], peers: Peers) -> None:
        super().__init__(params, {"lr": self.lr})
        self.peers = peers
        self.all: list[nn.Parameter] = self.param_groups[0]["params"]
        self.momenta: dict[int, Tensor] = {}
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for index, parameter in enumerate(self.all):
            if self.owner(index) == self.peers.rank:
                self.own_step(index, parameter)
        for index, parameter in enumerate(self.all):
            self.share(index, parameter)
        self.taken += 1

    def owner(self, index: int) -> int:
        """Return the rank that updates a parameter."""
        return index % self.peers.size

    def own_step(self, index: int, parameter: nn.Parameter) -> None:
        """Update a parameter that this rank owns."""
        gradient = parameter.grad + self.weight_decay * parameter
        place = self.place(index)
        before = self.momenta.get(place)
        value = gradient if before is None else self.momentum * before + gradient
        self.momenta[place] = value.clone()
        self.change(parameter, self.lr * value)

    def place(self, index: int) -> int:
        """Return the number under which a parameter's momentum is kept."""
        return index

    def change(self, parameter: nn.Parameter, delta: Tensor) -> None:
        """Subtract a change."""
        parameter.sub_(delta)

    def share(self, index: int, parameter: nn.Parameter) -> None:
        """Give all ranks the owner's values."""
        self.peers.broadcast(parameter.data, self.owner(index))


class Sharded(DataParallel):
    """Data parallelism with a sharded optimizer."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return ShardedSGD(self.model.parameters(), self.peers)
