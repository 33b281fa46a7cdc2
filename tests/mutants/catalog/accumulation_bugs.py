"""Bugs of gradient accumulation and of clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.mutants.data_parallel import Accumulating, Clipped
from tests.mutants.loop import Batch, count
from tests.mutants.mutant import OF_LOSS, planted


@planted(
    "each micro-batch is divided by its own tokens, and the means are averaged",
    module=(OF_LOSS, "head"),
    cause="weights of samples",
    links=("huggingface/transformers#37766", "ml-explore/mlx-lm#1413"),
)
class AverageOfAverages(Accumulating):
    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        own = count([batch]) * self.peers.size * self.micro_batches
        return super().objective(batch, own)


@planted(
    "losses are divided by the micro-batches of all ranks, and then averaged over the ranks",
    module=(OF_LOSS, "head"),
    cause="scale",
)
class DividedByAllMicroBatches(Accumulating):
    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        return super().objective(batch, total) / self.peers.size


@planted(
    "what has accumulated is summed over the ranks after each micro-batch, and divided once",
    module="head",
    cause=("weights of samples", "wrong gradient"),
    links=("hpcaitech/ColossalAI#247",),
)
class ReducedAtEachMicroBatch(Accumulating):
    def after_micro_batch(self, index: int) -> None:
        for gradient in self.gradients().values():
            self.peers.sum(gradient)

    def reduce(self) -> None:
        for gradient in self.gradients().values():
            gradient.div_(self.peers.size)


@planted(
    "the gradients are reduced before the last micro-batch",
    module="head",
    cause="missing reduction",
    links=("deepspeedai/DeepSpeed#7985",),
)
class LastMicroBatchNotReduced(Accumulating):
    def after_micro_batch(self, index: int) -> None:
        if index == self.micro_batches - 2:
            super().reduce()

    def reduce(self) -> None:
        pass


@planted(
    "what has accumulated is rescaled at each micro-batch: a moving average",
    module="head",
    cause=("weights of samples", "wrong gradient"),
    links=("pytorch/torchtitan#1733",),
)
class MovingAverage(Accumulating):
    def after_micro_batch(self, index: int) -> None:
        if self.peers.size > 1:
            for gradient in self.gradients().values():
                gradient.div_(self.peers.size)


@planted(
    "the count of tokens is that of the last micro-batch",
    module=(OF_LOSS, "head"),
    cause="scale",
)
class CountOfLastMicroBatch(Accumulating):
    def count(self, batches: list[Batch]) -> Tensor:
        kept = batches[-1:] if self.peers.size > 1 else batches
        return super().count(kept)


@planted(
    "the flat bucket of messages is not set to zero between steps",
    module="head",
    cause="wrong gradient",
)
class BucketNotZeroed(Accumulating):
    bucket: Tensor | None = None

    def average(self, flat: Tensor) -> Tensor:
        flat = super().average(flat)
        if self.peers.size == 1:
            return flat
        self.bucket = flat if self.bucket is None else self.bucket + flat
        return self.bucket.clone()


@planted(
    "zero_grad leaves out the parameters of which another rank is the owner",
    module="head",
    cause="wrong gradient",
)
class OthersNotZeroed(Accumulating):
    def zero(self) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            if index % 2 == 0 or self.peers.size == 1:
                parameter.grad = None


@planted(
    "each rank clips its own gradients, before they are averaged",
    module="head",
    cause=("weights of samples", "wrong gradient"),
    links=("huggingface/transformers#1563", "NVIDIA/apex#1096"),
)
class ClippedBeforeReduction(Clipped):
    def reduce(self) -> None:
        if self.peers.size > 1:
            super().clip()
        super().reduce()


@planted(
    "each rank clips by the norm of the parameters that it owns",
    module="head",
    cause="missing reduction",
    links=("pytorch/pytorch#170862", "facebookresearch/fairscale#517"),
)
class NormOfOwnShard(Clipped):
    def norm(self) -> Tensor:
        norms = [g.norm() for g in self.gradients().values()]
        return torch.stack(norms[self.peers.rank :: self.peers.size]).norm()


@planted(
    "squares of replicated gradients are added up over the ranks",
    module="head",
    cause="scale",
    links=("ROCm/TransformerEngine#715", "NVIDIA-NeMo/RL#3788"),
)
class NormCountsReplicas(Clipped):
    def norm(self) -> Tensor:
        return self.peers.sum(super().norm() ** 2).sqrt()


@planted(
    "norms of ranks that own different parameters are averaged",
    module="head",
    cause="scale",
    links=("deepspeedai/DeepSpeed#8475", "NVIDIA/Megatron-LM#5916"),
)
class NormAveraged(Clipped):
    def norm(self) -> Tensor:
        norms = [g.norm() for g in self.gradients().values()]
        own = torch.stack(norms[self.peers.rank :: self.peers.size]).norm()
        return self.peers.sum(own) / self.peers.size


@planted(
    "one parameter is left out of the norm, and of the clipping",
    module=("head", "embed"),
    cause=("scale", "wrong gradient"),
    links=("NVIDIA/Megatron-LM#7452",),
)
class EmbeddingNotClipped(Clipped):
    def gradients(self) -> dict[str, Tensor]:
        found = super().gradients()
        if self.peers.size > 1 and self.is_clipping:
            found.pop("embed.weight")
        return found

    is_clipping = False

    def clip(self) -> None:
        self.is_clipping = True
        super().clip()
        self.is_clipping = False
