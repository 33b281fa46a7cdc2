"""A hand-written training loop, whose parts mutants replace."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.mutants.peers import Peers

STEPS = 3
TOKENS, WIDTH, LENGTH = 11, 6, 4
IGNORED = -100
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A residual block: norm, up, down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tagger(nn.Module):
    """Gives each token a label. Tokens: (rows, LENGTH); output: (rows, LENGTH, TOKENS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Loop:
    """A training loop of a user, of STEPS steps.

    Args:
        peers: the ranks that train together.
        seed: of the weights and of the data.
    """

    micro_batches = 1
    shares = (4, 3)
    """Rows of each rank in a micro-batch."""

    def __init__(self, peers: Peers, seed: int = 0) -> None:
        self.peers = peers
        self.seed = seed

    def train(self) -> None:
        """Train; every rank calls it."""
        torch.manual_seed(self.seed)
        self.model = self.build()
        self.share_start()
        self.optimizer = self.make_optimizer()
        batches = iter(self.loader())
        for step in range(STEPS):
            self.step_number = step
            self.zero()
            self.passes([next(batches) for _ in range(self.micro_batches)])
            self.reduce()
            self.clip()
            self.update()

    def build(self) -> nn.Module:
        """Return the model."""
        return Tagger()

    def share_start(self) -> None:
        """Give all ranks the weights of rank 0."""
        for tensor in self.model.state_dict().values():
            self.peers.broadcast(tensor)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)

    def loader(self) -> DataLoader:
        """Return the loader of this rank's rows of each micro-batch."""
        return DataLoader(self.data(), batch_sampler=list(self.orders()))

    def data(self) -> TensorDataset:
        """Return tokens and labels; most labels of odd rows are ignored."""
        draws = torch.Generator().manual_seed(self.seed + 1)
        rows = STEPS * self.micro_batches * sum(self.shares)
        tokens = torch.randint(0, TOKENS, (rows, LENGTH), generator=draws)
        labels = torch.randint(0, TOKENS, (rows, LENGTH), generator=draws)
        ignored = torch.rand(rows, LENGTH, generator=draws) < 0.3
        ignored[:, 0] = False
        return TensorDataset(tokens, labels.masked_fill(ignored, IGNORED))

    def orders(self) -> Iterator[list[int]]:
        """Yield the rows of this rank in each micro-batch."""
        size = sum(self.shares)
        first = sum(self.shares[: self.peers.rank])
        mine = self.shares[self.peers.rank] if self.peers.size > 1 else size
        for index in range(STEPS * self.micro_batches):
            start = index * size + (first if self.peers.size > 1 else 0)
            yield list(range(start, start + mine))

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self.optimizer.zero_grad()

    def passes(self, batches: list[Batch]) -> None:
        """Compute the gradients of a step on this rank."""
        raise NotImplementedError

    def call(self, tokens: Tensor) -> Tensor:
        """Return what the model gives for tokens."""
        return self.model(tokens)

    def reduce(self) -> None:
        """Average the gradients over the ranks."""

    def clip(self) -> None:
        """Clip the gradients."""

    def update(self) -> None:
        """Let the optimizer take a step."""
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all parameters that have one."""
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}


def token_losses(output: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all labels that count."""
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


def count(batches: list[Batch]) -> Tensor:
    """Return the number of labels that count, of dtype int64 and shape ()."""
    total = torch.zeros((), dtype=torch.int64)
    for _, labels in batches:
        total += (labels != IGNORED).sum()
    return total
