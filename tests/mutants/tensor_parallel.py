"""A right loop of tensor parallelism, by hand: all ranks compute the same rows.

Each rank holds whole matrices, computes with its slice, and the gradients of slices are added up.

    norm -> copy to ranks -> up (rows of the matrix) -> down (columns) -> sum over ranks + bias
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mutants.loop import STEPS, TOKENS, WIDTH, Batch, Loop, count, token_losses
from tests.mutants.peers import CopyTo, GatherFrom, Peers, ReduceFrom, ReduceScatter, ScatterTo

HEADS = 2


class Column(nn.Linear):
    """A linear layer whose outputs are divided over the ranks."""

    peers: Peers
    is_sequence = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        bias = None if self.bias is None else self.peers.mine(self.bias, 0)
        return F.linear(x, self.peers.mine(self.weight, 0), bias)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of all ranks."""
        if self.is_sequence:
            return GatherFrom.apply(x, self.peers, 1)
        return CopyTo.apply(x, self.peers)


class Row(nn.Linear):
    """A linear layer whose inputs are divided over the ranks."""

    peers: Peers
    is_sequence = False

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, self.peers.mine(self.weight, 1))) + self.bias

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        if self.is_sequence:
            return ReduceScatter.apply(x, self.peers, 1)
        return ReduceFrom.apply(x, self.peers)


class Attention(nn.Module):
    """Causal attention; each rank computes some heads. One matrix holds queries, keys, values."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self.peers = peers
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = Row(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        weight, bias = self.cut(self.qkv.weight), self.cut(self.qkv.bias)
        rows, length, _ = x.shape
        heads = F.linear(x, weight, bias).view(rows, length, 3, -1, WIDTH // HEADS)
        q, k, v = (heads[:, :, i].transpose(1, 2) for i in range(3))
        scores = (q @ k.transpose(2, 3)) * self.scale(q)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of all ranks."""
        return CopyTo.apply(x, self.peers)

    def cut(self, fused: Tensor) -> Tensor:
        """Return this rank's heads of a fused tensor of queries, keys and values."""
        return torch.cat([self.peers.mine(part, 0) for part in fused.chunk(3)])

    def scale(self, q: Tensor) -> float:
        """Return the factor of the scores."""
        return float((WIDTH // HEADS) ** -0.5)


class Experts(nn.Module):
    """Two experts, mixed by a gate; each rank computes its own expert."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self.peers = peers
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.share(self.gate(x).softmax(-1))
        x = CopyTo.apply(x, self.peers)
        own = range(self.peers.rank, 2, self.peers.size)
        mixed = sum(weights[..., i : i + 1] * self.experts[i](x) for i in own)
        return ReduceFrom.apply(mixed, self.peers)

    def share(self, weights: Tensor) -> Tensor:
        """Return weights whose gradients come from all experts."""
        return CopyTo.apply(weights, self.peers)


class SlicedBlock(nn.Module):
    """Attention, two linear layers and experts, each with a residual path."""

    def __init__(self, loop: TensorParallel) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = loop.attention(loop.peers)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = loop.column(WIDTH, 2 * WIDTH)
        self.down = loop.row(2 * WIDTH, WIDTH)
        self.experts = loop.experts(loop.peers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.experts(x)


class SlicedTagger(nn.Module):
    """The tagger of tensor parallelism: an embedding, a block, a head."""

    def __init__(self, loop: TensorParallel) -> None:
        super().__init__()
        self.embed = loop.embedding(TOKENS, WIDTH)
        self.block = SlicedBlock(loop)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(tokens))))


class Vocabulary(nn.Embedding):
    """An embedding whose rows are divided over the ranks."""

    peers: Peers

    def forward(self, tokens: Tensor) -> Tensor:
        start, end = self.range()
        mine = (tokens >= start) & (tokens < end)
        found = F.embedding(tokens.masked_fill(~mine, 0), self.weight)
        return ReduceFrom.apply(found * mine.unsqueeze(-1), self.peers)

    def range(self) -> tuple[int, int]:
        """Return the first row of this rank, and the one after its last."""
        size = -(-TOKENS // self.peers.size)
        return self.peers.rank * size, min(TOKENS, (self.peers.rank + 1) * size)


class TensorParallel(Loop):
    """Both ranks compute all rows, each with its slices."""

    shares = (5,)
    column, row, attention, experts, embedding = Column, Row, Attention, Experts, Vocabulary
    sliced = (
        "embed.weight",
        "up.weight",
        "up.bias",
        "down.weight",
        "qkv",
        "out.weight",
        "experts.",
    )
    """Parts of the names of parameters of which each rank has a part of the gradient."""

    def build(self) -> nn.Module:
        model = self.model_of_ranks()
        for module in model.modules():
            if isinstance(module, Column | Row | Vocabulary):
                module.peers = self.peers
        return model

    def model_of_ranks(self) -> nn.Module:
        """Return the model before its layers know the ranks."""
        return SlicedTagger(self)

    def orders(self) -> Iterator[list[int]]:
        size = sum(self.shares)
        return (list(range(s, s + size)) for s in range(0, size * STEPS, size))

    def passes(self, batches: list[Batch]) -> None:
        for tokens, labels in batches:
            (token_losses(self.call(tokens), labels) / count(batches)).backward()

    def reduce(self) -> None:
        for name, gradient in self.gradients().items():
            if self.is_partial(name):
                self.peers.sum(gradient)

    def gradients(self) -> dict[str, Tensor]:
        for parameter in self.model.parameters():  # of the other rank's expert
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().gradients()

    def is_partial(self, name: str) -> bool:
        """Return True if the gradients of ranks add up to the whole one."""
        return any(part in name for part in self.sliced) and "gate" not in name


class SequenceBlock(nn.Module):
    """Norm, up, down between which the sequence is divided over the ranks."""

    def __init__(self, loop: SequenceParallel) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = loop.column(WIDTH, 2 * WIDTH)
        self.down = loop.row(2 * WIDTH, WIDTH)
        self.up.is_sequence = self.down.is_sequence = True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SequenceTagger(nn.Module):
    """The tagger of sequence parallelism: between regions a rank has half of the tokens."""

    def __init__(self, loop: SequenceParallel) -> None:
        super().__init__()
        self.peers = loop.peers
        self.scatter, self.gather = loop.scatter, loop.gather
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([SequenceBlock(loop), SequenceBlock(loop)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.scatter(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.gather(x)))


class SequenceParallel(TensorParallel):
    """Tensor parallelism with activations divided along the sequence between its regions."""

    sliced = ("up.", "down.", "blocks.0.norm", "blocks.1.norm")

    def model_of_ranks(self) -> nn.Module:
        return SequenceTagger(self)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sequence."""
        return ScatterTo.apply(x, self.peers, 1)

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole sequence; what follows is the same on all ranks."""
        return JoinSequence.apply(x, self.peers)


class JoinSequence(torch.autograd.Function):
    """Joins the parts of a sequence; its gradient, equal on all ranks, is cut."""

    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.peers = peers
        return torch.cat(peers.gather(x), 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.peers.mine(gradient, 1).contiguous(), None
