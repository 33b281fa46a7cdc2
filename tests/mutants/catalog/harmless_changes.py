"""Changes that must stay silent: other messages, other orders, more work without an effect."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.mutants.catalog.state_bugs import Buffered, SyncNormed
from tests.mutants.data_parallel import Accumulating, Clipped, DataParallel
from tests.mutants.loop import Batch, Tagger
from tests.mutants.mutant import harmless
from tests.mutants.pipelined import Pipelined, Tied
from tests.mutants.sharded_sgd import Sharded, ShardedSGD
from tests.mutants.tensor_parallel import Row, SequenceParallel, TensorParallel


@harmless("none: data parallelism by hand, uneven shares")
class RightDataParallel(DataParallel):
    pass


@harmless("none: two micro-batches on each rank")
class RightAccumulation(Accumulating):
    pass


@harmless("none: clipped after the reduction")
class RightClipping(Clipped):
    pass


@harmless("none: tensor parallelism by hand, with experts")
class RightTensorParallel(TensorParallel):
    pass


@harmless("none: sequence parallelism by hand")
class RightSequenceParallel(SequenceParallel):
    pass


@harmless("none: two stages by hand")
class RightPipeline(Pipelined):
    pass


@harmless("none: two stages with a tied matrix")
class RightTiedPipeline(Tied):
    pass


@harmless("none: a sharded optimizer by hand")
class RightSharding(Sharded):
    pass


@harmless("none: a buffer that all ranks update together")
class RightBuffer(Buffered):
    pass


@harmless("none: statistics of all ranks' rows")
class RightSyncNorm(SyncNormed):
    pass


@harmless("a message for each parameter in place of one")
class SmallBuckets(DataParallel):
    def reduce(self) -> None:
        for gradient in self.gradients().values():
            gradient.copy_(self.average(gradient))


@harmless("parameters in reverse order in the message")
class ReverseBucket(DataParallel):
    def reduced(self) -> dict[str, Tensor]:
        return dict(reversed(self.gradients().items()))


@harmless("an all-gather and a sum in reverse order in place of an all-reduce")
class GatheredSum(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return sum(reversed(self.peers.gather(flat)), torch.zeros_like(flat)) / self.peers.size


@harmless("gradients divided before they are summed")
class DividedBefore(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return self.peers.sum(flat / self.peers.size)


@harmless("a mean of gradients that are equal already")
class AveragedTwice(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return super().average(super().average(flat))


@harmless("sums in float64")
class SumsInFloat64(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return super().average(flat.double()).to(flat.dtype)


@harmless("a barrier, and contiguous copies of all gradients")
class Barriers(DataParallel):
    def reduce(self) -> None:
        self.peers.barrier()
        for parameter in self.model.parameters():
            parameter.grad = parameter.grad.clone().contiguous()
        super().reduce()


@harmless("a forward pass in evaluation before each step")
class EvaluatesBefore(DataParallel):
    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            self.model(batch[0])
        self.model.train()
        return super().objective(batch, total)


@harmless("gradients set to zero twice, and kept as zeros")
class ZeroedTwice(DataParallel):
    def zero(self) -> None:
        super().zero()
        self.optimizer.zero_grad(set_to_none=False)


@harmless("the parameters given to the optimizer in reverse order")
class ReverseParameters(DataParallel):
    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters = [*self.model.parameters()]
        if self.peers.size > 1:
            parameters.reverse()
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


@harmless("the weights broadcast again after each step")
class BroadcastEachStep(DataParallel):
    def zero(self) -> None:
        super().zero()
        self.share_start()


@harmless("shares of 5 and 2 rows")
class OtherShares(DataParallel):
    shares = (5, 2)


@harmless("DistributedDataParallel with small buckets")
class Wrapped(DataParallel):
    def share_start(self) -> None:
        if self.peers.size > 1:
            self.model = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.0001)

    def reduce(self) -> None:
        pass


class RecomputedTagger(Tagger):
    """A tagger whose blocks are computed again in the backward pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


@harmless("blocks computed again in the backward pass")
class Recomputes(DataParallel):
    def build(self) -> nn.Module:
        return RecomputedTagger() if self.peers.size > 1 else Tagger()


@harmless("the norm of the gradients taken of one flat tensor")
class FlatNorm(Clipped):
    def norm(self) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in self.gradients().values()]).norm()


class BiasOnRankZero(Row):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.peers.rank == 0 else None
        return self.leave(nn.functional.linear(x, self.peers.mine(self.weight, 1), bias))


@harmless("the bias of row-parallel layers added by rank 0 before the sum")
class BiasOfRankZero(TensorParallel):
    row = BiasOnRankZero
    sliced = (*TensorParallel.sliced, "down.bias")


class OwnersReversed(ShardedSGD):
    def owner(self, index: int) -> int:
        return self.peers.size - 1 - index % self.peers.size


@harmless("parameters owned by other ranks")
class OtherOwners(Sharded):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return OwnersReversed(self.model.parameters(), self.peers)


@harmless("rows of a batch in reverse order on each rank")
class RowsReversed(DataParallel):
    def orders(self) -> Iterator[list[int]]:
        return (rows[::-1] for rows in super().orders())
