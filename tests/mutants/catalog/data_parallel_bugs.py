"""Bugs of data parallelism: scales, weights of samples, reductions, starts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.mutants.data_parallel import DataParallel
from tests.mutants.loop import IGNORED, Batch, count, token_losses
from tests.mutants.mutant import OF_LOSS, OF_SAMPLES, planted


@planted("gradients are summed over the ranks, not averaged", module="head", cause="scale")
class SumForMean(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return self.peers.sum(flat)


@planted(
    "the mean over ranks is divided by their number once more",
    module="head",
    cause="scale",
    links=("meta-pytorch/torchtune#2172",),
)
class DividedTwice(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return self.peers.sum(flat) / self.peers.size**2


@planted(
    "the loss is divided by the number of ranks, and then averaged over them",
    module=(OF_LOSS, "head"),
    cause="scale",
    links=("radixark/miles#3231",),
)
class LossDividedByRanks(DataParallel):
    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        return super().objective(batch, total) / self.peers.size


@planted(
    "gradients of one block are divided by the size of another group",
    module="blocks.1.down",
    cause="scale",
    links=("pytorch/pytorch#160285", "pytorch/torchtitan#1551", "NVIDIA/Megatron-LM#7165"),
)
class WrongGroup(DataParallel):
    def reduce(self) -> None:
        super().reduce()
        for name, gradient in self.gradients().items():
            if name.startswith("blocks.1."):
                gradient.div_(self.peers.size)


@planted(
    "each rank divides by the number of its own tokens",
    module=(OF_LOSS, "head"),
    cause="weights of samples",
    links=("huggingface/transformers#35203", "PrimeIntellect-ai/prime-rl#1960"),
)
class TokenMeanPerRank(DataParallel):
    def count(self, batches: list[Batch]) -> Tensor:
        return count(batches) * self.peers.size


@planted(
    "means over rows of uneven shares are averaged over the ranks",
    module=(OF_LOSS, "head"),
    cause="weights of samples",
    links=("pytorch/pytorch#42577", "pytorch/pytorch#67253"),
)
class MeanOfUnevenShares(DataParallel):
    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        tokens, labels = batch
        losses = nn.functional.cross_entropy(
            self.call(tokens).flatten(0, 1).float(), labels.flatten(), reduction="none"
        )
        return losses.view(labels.shape).mean(1).mean()


@planted(
    "the last parameter of the bucket is left out of the message",
    module="head",
    cause="missing reduction",
    links=("facebookresearch/fairscale#132",),
)
class MissedParameter(DataParallel):
    def reduced(self) -> dict[str, Tensor]:
        return dict(list(self.gradients().items())[:-1])


@planted("the gradient of the embedding is not reduced", module="embed", cause="missing reduction")
class EmbeddingNotReduced(DataParallel):
    def reduced(self) -> dict[str, Tensor]:
        return {name: g for name, g in self.gradients().items() if name != "embed.weight"}


@planted(
    "the forward pass goes past DistributedDataParallel, to model.module",
    module="head",
    cause="missing reduction",
    links=("jingyaogong/minimind#853", "moojink/openvla-oft#160"),
)
class PastTheWrapper(DataParallel):
    def share_start(self) -> None:
        self.wrapper = self.model
        if self.peers.size > 1:
            self.wrapper = nn.parallel.DistributedDataParallel(self.model)

    def reduce(self) -> None:
        pass  # the wrapper would do it, had it been called


@planted(
    "rank 0's gradients are broadcast where they should be averaged",
    module="head",
    cause="missing reduction",
)
class BroadcastForMean(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return self.peers.broadcast(flat)


@planted(
    "all-reduced in a hook and again after the backward pass, divided once",
    module="head",
    cause="scale",
    links=("hpcaitech/ColossalAI#247",),
)
class ReducedTwice(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return self.peers.sum(self.peers.sum(flat)) / self.peers.size


@planted(
    "nothing is broadcast at the start, and each rank has a seed of its own",
    module="embed",
    cause="ranks apart",
)
class NoStart(DataParallel):
    def build(self) -> nn.Module:
        torch.manual_seed(self.seed + self.peers.rank)
        return super().build()

    def share_start(self) -> None:
        pass


@planted(
    "a head that is made after the broadcast has a seed of each rank",
    module="head",
    cause="ranks apart",
)
class LateHead(DataParallel):
    def share_start(self) -> None:
        super().share_start()
        torch.manual_seed(self.seed + self.peers.rank)
        self.model.head.reset_parameters()


@planted(
    "both ranks read the same rows: the sampler does not know the rank",
    module=OF_SAMPLES,
    cause="same samples",
    links=("Smith42/astroPT#64",),
)
class SameRows(DataParallel):
    def orders(self):
        size = sum(self.shares)
        mine = self.shares[0] if self.peers.size > 1 else size
        return (list(range(s, s + mine)) for s in range(0, 3 * size, size))


@planted(
    "rank 1 drops the last row of its batch, and still counts it",
    module=(OF_LOSS, "head"),
    cause="weights of samples",
)
class RowDropped(DataParallel):
    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        tokens, labels = batch
        if self.peers.rank == 1:
            labels = labels.clone()
            labels[-1] = IGNORED
        return token_losses(self.call(tokens), labels) * self.peers.size / total


@planted(
    "all ranks divide by the number of tokens of rank 0",
    module=(OF_LOSS, "head"),
    cause="scale",
    links=("vllm-project/speculators#942",),
)
class CountOfRankZero(DataParallel):
    def count(self, batches: list[Batch]) -> Tensor:
        return self.peers.broadcast(count(batches)) * self.peers.size


@planted(
    "each rank pads its labels as tokens that count",
    module=(OF_LOSS, "head"),
    cause="weights of samples",
)
class PaddingCounts(DataParallel):
    def objective(self, batch: Batch, total: Tensor) -> Tensor:
        tokens, labels = batch
        if self.peers.rank == 1:
            labels = labels.masked_fill(labels == IGNORED, 0)
        return super().objective((tokens, labels), total)


@planted(
    "buckets are flattened in one order and read back in another",
    module=("head", "blocks.1.norm", "norm"),
    cause="wrong gradient",
)
class BucketOrder(DataParallel):
    def reduce(self) -> None:
        super().reduce()
        if self.peers.size > 1:  # weights of norms have one shape
            gradients = self.gradients()
            one, other = gradients["blocks.1.norm.weight"], gradients["norm.weight"]
            one_value = one.clone()
            one.copy_(other)
            other.copy_(one_value)


@planted(
    "the message is rounded to bfloat16",
    module="head",
    cause="wrong gradient",
)
class RoundedMessage(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        if self.peers.size == 1:
            return flat
        return super().average(flat.bfloat16().to(flat.dtype))


@planted(
    "from the second step on, each rank divides by the number of its own tokens",
    module=(OF_LOSS, "head"),
    cause="weights of samples",
)
class TokenMeanPerRankLater(DataParallel):
    def count(self, batches: list[Batch]) -> Tensor:
        if self.step_number == 0:
            return super().count(batches)
        return count(batches) * self.peers.size


@planted(
    "a hook clamps the gradients of outputs, whose scale is that of a rank's own mean",
    module=(OF_LOSS, "head"),
    cause=("weights of samples", "wrong gradient", "scale"),
)
class ClampedOutputs(DataParallel):
    def call(self, tokens: Tensor) -> Tensor:
        output = super().call(tokens)
        output.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return output


@planted(
    "a hook clamps the gradients of parameters on each rank, before they are averaged",
    module="head",
    cause=("weights of samples", "wrong gradient"),
)
class ClampedBeforeReduction(DataParallel):
    def reduce(self) -> None:
        if self.peers.size > 1:
            for gradient in self.gradients().values():
                gradient.clamp_(-0.01, 0.01)
        super().reduce()
        for gradient in self.gradients().values():
            gradient.clamp_(-0.01, 0.01)
