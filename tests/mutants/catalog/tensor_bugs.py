"""Bugs of tensor and sequence parallelism."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.mutants.loop import WIDTH
from tests.mutants.mutant import planted
from tests.mutants.peers import Peers
from tests.mutants.tensor_parallel import (
    Attention,
    Column,
    Experts,
    Row,
    SequenceParallel,
    TensorParallel,
    Vocabulary,
)


class BiasBeforeSum(Row):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, self.peers.mine(self.weight, 1), self.bias))


@planted(
    "the bias of a row-parallel layer is added on every rank, before the sum",
    module="block.attention.out",
    cause="wrong output",
    links=("Wenyueh/MinivLLM#80", "huggingface/text-generation-inference#1036"),
)
class BiasOnEveryRank(TensorParallel):
    def build(self):
        model = super().build()
        model.block.attention.out.__class__ = BiasBeforeSum
        return model


class BiasInParts(Row):
    def forward(self, x: Tensor) -> Tensor:
        part = self.bias / self.peers.size
        return self.leave(F.linear(x, self.peers.mine(self.weight, 1), part))


@planted(
    "each rank adds its part of the bias, which divides the bias' gradient as well",
    module="block.down",
    cause="scale",
    links=("pytorch/torchtitan#4332",),
)
class BiasGradientDivided(TensorParallel):
    def build(self):
        model = super().build()
        model.block.down.__class__ = BiasInParts
        return model


class InputNotReduced(Column):
    def enter(self, x: Tensor) -> Tensor:
        return x


@planted(
    "the input gradient of a column-parallel layer is not added up",
    module="block.norm",
    cause="missing reduction",
    links=("pytorch/torchtitan#1805", "NovaSky-AI/SkyRL#1886"),
)
class ColumnInputNotReduced(TensorParallel):
    column = InputNotReduced


class InputAveraged(Column):
    def enter(self, x: Tensor) -> Tensor:
        y = super().enter(x)
        return y / self.peers.size + (y - y / self.peers.size).detach()


@planted(
    "the input gradient of a column-parallel layer is averaged over the ranks",
    module="block.norm",
    cause=("scale", "wrong gradient"),
    links=("inclusionAI/AReno#496",),
)
class ColumnInputAveraged(TensorParallel):
    column = InputAveraged


class OneBlock(Attention):
    def cut(self, fused: Tensor) -> Tensor:
        return self.peers.mine(fused, 0)


@planted(
    "the fused matrix of queries, keys and values is cut in one block, not in three",
    module=("block.attention", "block.attention.out"),
    cause="wrong output",
    links=("huggingface/transformers#17653",),
)
class FusedInOneBlock(TensorParallel):
    attention = OneBlock


class WholeWidth(Attention):
    def scale(self, q: Tensor) -> float:
        return float((WIDTH // q.shape[1]) ** -0.5)


@planted(
    "attention is scaled by the width over the number of a rank's heads",
    module=("block.attention", "block.attention.out"),
    cause="wrong output",
)
class ScaledByOwnHeads(TensorParallel):
    attention = WholeWidth


class GateNotShared(Experts):
    def share(self, weights: Tensor) -> Tensor:
        return weights


@planted(
    "the gate of the experts is replicated, and its gradient is that of one rank's expert",
    module="block.experts.gate",
    cause="missing reduction",
    links=("pytorch/torchtitan#2387", "huggingface/transformers#48687"),
)
class GateNotReduced(TensorParallel):
    experts = GateNotShared


class RangeOverlaps(Vocabulary):
    def range(self) -> tuple[int, int]:
        start, end = super().range()
        return (start - 1 if start else start), end


@planted(
    "the vocabularies of two ranks overlap by one token",
    module="embed",
    cause="wrong output",
)
class VocabularyOverlaps(TensorParallel):
    embedding = RangeOverlaps


@planted(
    "gradients of the sliced layers are averaged over the ranks, not added up",
    module=("block.experts.experts.1", "block.experts.experts.0"),
    cause="scale",
)
class SlicesAveraged(TensorParallel):
    def reduce(self) -> None:
        super().reduce()
        for name, gradient in self.gradients().items():
            if self.is_partial(name):
                gradient.div_(self.peers.size)


@planted(
    "the bias of a replicated layer is added up over the ranks, as if it were sliced",
    module="block.down",
    cause="scale",
)
class ReplicatedBiasSummed(TensorParallel):
    def is_partial(self, name: str) -> bool:
        return super().is_partial(name) or name.endswith("down.bias")


@planted(
    "norms in the sequence region: their gradients are not added up over the ranks",
    module="blocks.1.norm",
    cause="missing reduction",
    links=("NVIDIA/Megatron-LM#1446", "NVIDIA/TransformerEngine#435"),
)
class SequenceNormNotReduced(SequenceParallel):
    def is_partial(self, name: str) -> bool:
        return super().is_partial(name) and not name.startswith("blocks.1.norm")


@planted(
    "norms in the sequence region: their gradients are averaged over the ranks",
    module="blocks.1.norm",
    cause="scale",
    links=("EleutherAI/gpt-neox#1259",),
)
class SequenceNormAveraged(SequenceParallel):
    def reduce(self) -> None:
        super().reduce()
        for name, gradient in self.gradients().items():
            if "blocks" in name and ".norm." in name:
                gradient.div_(self.peers.size)


@planted(
    "norms in the sequence region: their gradients are added up twice",
    module="blocks.1.norm",
    cause="scale",
    links=("NVIDIA/TransformerEngine#1677",),
)
class SequenceNormTwice(SequenceParallel):
    def reduce(self) -> None:
        super().reduce()
        for name, gradient in self.gradients().items():
            if "blocks" in name and ".norm." in name:
                self.peers.sum(gradient)


class GatherAlongRows(torch.autograd.Function):
    """Joins along the sequence; its gradient is cut in another order of ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return torch.cat(peers.gather(x), 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.chunk(ctx.peers.size, 1)
        return parts[ctx.peers.size - 1 - ctx.peers.rank].contiguous(), None


@planted(
    "the backward pass of a gather returns another rank's part",
    module="blocks.1.down",
    cause="wrong gradient",
    links=("NVIDIA/TransformerEngine#530",),
)
class GatherWrongBackward(SequenceParallel):
    def gather(self, x: Tensor) -> Tensor:
        return GatherAlongRows.apply(x, self.peers)


@planted(
    "the parts of the sequence are joined in the reverse order of the ranks",
    module=("norm",),
    cause="wrong output",
)
class SequenceReversed(SequenceParallel):
    def gather(self, x: Tensor) -> Tensor:
        whole = super().gather(x)
        return torch.cat(whole.chunk(self.peers.size, 1)[::-1], 1)


class ScatterOnly(torch.autograd.Function):
    """Cuts a sequence; its gradient is zero where other ranks' parts are."""

    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers, ctx.shape = peers, x.shape
        return peers.mine(x, 1).contiguous()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.new_zeros(ctx.shape)
        ctx.peers.mine(whole, 1).copy_(gradient)
        return whole, None


@planted(
    "the backward pass of a scatter does not gather: the embedding has one rank's part",
    module="embed",
    cause="missing reduction",
    links=("NVIDIA-NeMo/Automodel#1260", "pytorch/pytorch#172932"),
)
class ScatterNotGathered(SequenceParallel):
    def scatter(self, x: Tensor) -> Tensor:
        return ScatterOnly.apply(x, self.peers)
