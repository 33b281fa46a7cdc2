"""Bugs of optimizers: their settings, their state, what they hold, sharded updates."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.mutants.data_parallel import DataParallel
from tests.mutants.mutant import planted
from tests.mutants.sharded_sgd import Sharded, ShardedSGD


@planted(
    "rank 1 steps with another learning rate",
    module="embed",
    cause="update",
    links=("huggingface/accelerate#1382", "Lightricks/LTX-Video-Trainer#67"),
)
class RatePerRank(DataParallel):
    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        optimizer.param_groups[0]["lr"] /= 1 + self.peers.rank
        return optimizer


@planted(
    "the second group loses its weight decay when the parameters are sharded",
    module="embed",
    cause="update",
    links=("pytorch/pytorch#54736", "pytorch/pytorch#78599"),
)
class GroupOptionsLost(DataParallel):
    def make_optimizer(self) -> torch.optim.Optimizer:
        decay = 0.1 if self.peers.size == 1 else 0.0
        norms = [p for p in self.model.parameters() if p.dim() == 1]
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        groups = [{"params": norms}, {"params": matrices, "weight_decay": decay}]
        return torch.optim.SGD(groups, lr=0.3)


@planted(
    "weights are decayed by each rank's optimizer and once more when they are shared",
    module="embed",
    cause="update",
)
class DecayedTwice(Sharded):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return DecayingTwice(self.model.parameters(), self.peers)


class DecayingTwice(ShardedSGD):
    weight_decay = 0.1

    def share(self, index: int, parameter: nn.Parameter) -> None:
        if self.peers.size > 1:
            parameter.data.mul_(1 - self.lr * self.weight_decay)
        super().share(index, parameter)


@planted(
    "the optimizer holds the parameters from before the model was copied",
    module="head",
    cause="not updated",
    links=("huggingface/accelerate#3256", "pytorch/pytorch#149205"),
)
class StaleParameters(DataParallel):
    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        if self.peers.size > 1:
            self.model = copy.deepcopy(self.model)
        return optimizer


@planted(
    "the parameters of the head are not given to the optimizer",
    module="head",
    cause="not updated",
)
class HeadNotHeld(DataParallel):
    def make_optimizer(self) -> torch.optim.Optimizer:
        held = [*self.model.named_parameters()]
        if self.peers.size > 1:
            held = [(name, p) for name, p in held if not name.startswith("head")]
        return torch.optim.SGD([p for _, p in held], lr=0.3, momentum=0.9)


@planted(
    "one block's gradients are set to zero before the message",
    module="blocks.0.down",
    cause="missing gradient",
)
class BlockFrozen(DataParallel):
    def reduced(self) -> dict[str, Tensor]:
        found = self.gradients()
        if self.peers.size > 1:
            for name, gradient in found.items():
                if name.startswith("blocks.0"):
                    gradient.zero_()
        return found


def sharded(change: type[ShardedSGD]) -> Callable[[Sharded], torch.optim.Optimizer]:
    """Return a `make_optimizer` with this class."""

    def make(loop: Sharded) -> torch.optim.Optimizer:
        return change(loop.model.parameters(), loop.peers)

    return make


class OneNotShared(ShardedSGD):
    def share(self, index: int, parameter: nn.Parameter) -> None:
        if index != len(self.all) - 1:  # head.bias
            super().share(index, parameter)


@planted("the owner's update of one parameter is not broadcast", module="head", cause="update")
class UpdateNotShared(Sharded):
    make_optimizer = sharded(OneNotShared)


class StateByNumber(ShardedSGD):
    def place(self, index: int) -> int:
        same = [i for i, p in enumerate(self.all) if p.shape == self.all[index].shape]
        return same[0] if self.peers.size > 1 else index


@planted(
    "two tensors of one shape share one momentum: state is kept by shape, not by name",
    module="blocks.0.down",
    cause="update",
)
class SharedMomentum(Sharded):
    make_optimizer = sharded(StateByNumber)


class RemainderLost(ShardedSGD):
    def change(self, parameter: nn.Parameter, delta: Tensor) -> None:
        if self.peers.size > 1:
            rows = parameter.shape[0] - parameter.shape[0] % self.peers.size
            delta[rows:] = 0
        super().change(parameter, delta)


@planted(
    "rows that the number of ranks does not divide are never updated",
    module="embed",
    cause=("update", "not updated"),
    links=("pytorch/pytorch#176076",),
)
class LastRowsNotUpdated(Sharded):
    make_optimizer = sharded(RemainderLost)


class StateLost(ShardedSGD):
    def place(self, index: int) -> int:
        if self.peers.size > 1 and self.taken % 2 == 0:
            self.momenta.pop(index, None)
        return index


@planted(
    "the momentum is lost when shards are made anew, in every second step",
    module="embed",
    cause="update",
    links=("pytorch/torchtitan#1702",),
)
class MomentumLost(Sharded):
    make_optimizer = sharded(StateLost)


@planted(
    "a layer reads weights that were gathered before the last update arrived",
    module="embed",
    cause="wrong output",
    links=("deepspeedai/DeepSpeed#5545",),
)
class StaleGather(Sharded):
    def build(self) -> nn.Module:
        model = super().build()
        if self.peers.size > 1:
            model.embed.__class__ = StaleEmbedding
        return model


class StaleEmbedding(nn.Embedding):
    gathered: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        now = self.weight.detach().clone()
        stale = now if self.gathered is None else self.gathered
        self.gathered = now
        return super().forward(tokens) + (stale - now)[tokens]


@planted(
    "the count of steps differs by one where the state was initialised by an empty step",
    module="embed",
    cause="update",
    links=("NVIDIA/Megatron-LM#5976",),
)
class StepCounter(DataParallel):
    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if self.peers.size > 1:
            for parameter in self.model.parameters():
                optimizer.state[parameter] = {
                    "step": torch.ones(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return optimizer
