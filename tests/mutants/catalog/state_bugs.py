"""Bugs of buffers, of batch statistics and of random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.mutants.data_parallel import DataParallel
from tests.mutants.loop import TOKENS, WIDTH, Tagger
from tests.mutants.mutant import planted
from tests.mutants.peers import Peers, ReduceFrom


class Centred(nn.Module):
    """Subtracts a running mean of what all ranks have seen."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self.peers = peers
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        with torch.no_grad():
            rows = x.detach().flatten(0, -2)
            total, count = self.total(
                rows.sum(0).to(self.mean.dtype), torch.tensor(float(len(rows)))
            )
            self.mean = 0.9 * self.mean + 0.1 * total / count
        return centred

    def total(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum and the number of rows of all ranks."""
        return self.peers.sum(total), self.peers.sum(count)


class CentredTagger(Tagger):
    """A tagger with a buffer that each step reads and writes."""

    def __init__(self, centre: nn.Module) -> None:
        super().__init__()
        self.centre = centre

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.centre(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Buffered(DataParallel):
    """Data parallelism with a running mean over the rows of all ranks."""

    centre: type[Centred] = Centred

    def build(self) -> nn.Module:
        return CentredTagger(self.centre(self.peers))


class OwnMean(Centred):
    def total(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return total, count


@planted(
    "a running mean is updated from a rank's own rows",
    module="centre",
    cause="buffer",
    links=("pfnet/pytorch-pfn-extras#117",),
)
class BufferPerRank(Buffered):
    centre = OwnMean


class FirstMean(Centred):
    def total(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return self.peers.broadcast(total), self.peers.broadcast(count)


@planted(
    "rank 0's running mean is broadcast: the other ranks' rows are lost",
    module="centre",
    cause="wrong buffer",
)
class BufferOfRankZero(Buffered):
    centre = FirstMean


class StaleMean(Centred):
    def total(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        found = super().total(total, count)
        before, self.before = getattr(self, "before", found), found
        return found if self.peers.size == 1 else before


@planted(
    "a buffer is one step old: its sum is used in the step after",
    module="centre",
    cause="wrong buffer",
)
class StaleBuffer(Buffered):
    centre = StaleMean


class BatchNormed(DataParallel):
    """Data parallelism with batch statistics of a rank's own rows."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(TOKENS, WIDTH),
            Transposed(),
            nn.BatchNorm1d(WIDTH),
            Transposed(),
            nn.Linear(WIDTH, TOKENS),
        )


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@planted("BatchNorm normalises over the rows of one rank", module="2", cause="batch statistics")
class BatchNormPerRank(BatchNormed):
    pass


class SyncNorm(nn.Module):
    """Normalises over the rows of all ranks. Rows: (n, WIDTH)."""

    def __init__(self, peers: Peers, is_right: bool) -> None:
        super().__init__()
        self.peers, self.is_right = peers, is_right
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        count = self.peers.sum(torch.tensor(float(len(rows))))
        mean = self.all(rows.sum(0)) / count
        variance = self.all(((rows - mean) ** 2).sum(0)) / count
        return (x - mean) / (variance + 1e-5).sqrt() * self.gain

    def all(self, value: Tensor) -> Tensor:
        """Return a sum over the ranks, whose gradient is a sum as well if this is right."""
        if self.is_right:
            return SumBothWays.apply(value, self.peers)
        return ReduceFrom.apply(value, self.peers)


class SumBothWays(torch.autograd.Function):
    """Sum over the ranks, whose gradient is added up as well."""

    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.sum(x.clone())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(gradient.clone()), None


class SyncNormed(DataParallel):
    """Data parallelism with statistics of all ranks' rows."""

    is_right = True

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(TOKENS, WIDTH),
            SyncNorm(self.peers, self.is_right),
            nn.Linear(WIDTH, TOKENS),
        )


@planted(
    "a synchronised norm does not add up the gradients of its statistics",
    module=("0", "1"),
    cause="wrong gradient",
    links=("pytorch/pytorch#36382", "NVIDIA/apex#387"),
)
class SyncNormBackward(SyncNormed):
    is_right = False


class DroppingTagger(Tagger):
    """A tagger with dropout before its head."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(self.norm(x), 0.3))


@planted(
    "all data ranks draw the same masks of dropout",
    module=("", "head"),
    cause="random numbers",
    links=("tenstorrent/tt-metal#55947", "InternLM/InternLM#405"),
)
class SameMasks(DataParallel):
    def build(self) -> nn.Module:
        return DroppingTagger()


class NoisyTagger(Tagger):
    """A tagger with noise before its head."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x + 0.1 * torch.randn_like(x))


@planted(
    "all data ranks draw the same noise",
    module=("", "head"),
    cause=("random numbers", "wrong output"),
)
class SameNoise(DataParallel):
    def build(self) -> nn.Module:
        return NoisyTagger()


class BranchedTagger(Tagger):
    """A tagger that calls one block in every second step only."""

    step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        if self.step % 2 == 0:
            x = self.blocks[1](x)
        self.step += 1
        return self.head(self.norm(x))


@planted(
    "parameters that a step does not use keep the gradient of the last one",
    module=("blocks.1.down", "blocks.1.norm", "blocks.1.up"),
    cause="wrong gradient",
    links=("pytorch/pytorch#112152", "NVIDIA-NeMo/Automodel#2995"),
)
class UnusedKeepGradient(DataParallel):
    def build(self) -> nn.Module:
        return BranchedTagger()

    def reduce(self) -> None:
        super().reduce()
        now = self.gradients()
        kept = getattr(self, "kept", {})
        if self.peers.size > 1:
            for name, parameter in self.model.named_parameters():
                if name not in now:
                    parameter.grad = kept[name]
        self.kept = {name: gradient.clone() for name, gradient in now.items()}
