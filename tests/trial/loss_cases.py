"""Cases of losses with the verdict that each must get, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.trial import LossKind

N, WIDTH, CLASSES, TOKENS, WORDS = 12, 6, 4, 5, 11


class Case(NamedTuple):
    name: str
    kind: LossKind
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], list[nn.Module]]]


CASES: list[Case] = []


def case(kind: LossKind) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(make.__name__, kind, make))
        return make

    return add


mean, total, counted = case(LossKind.MEAN), case(LossKind.SUM), case(LossKind.COUNTED)
coupled, fails = case(LossKind.COUPLED), case(LossKind.FAILS_ON_PARTS)


def mlp(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


def x(*shape: int) -> Tensor:
    return torch.randn(N, *(shape or (WIDTH,)))


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (N,))


def simple(loss: Callable[[Tensor, Tensor], Any], outputs: int = CLASSES, y: Any = None) -> Any:
    """A loss of a model's output and a target."""
    model = mlp(outputs)
    return (lambda a, b: loss(model(a), b)), (x(), labels() if y is None else y), [model]


class Language(nn.Module):
    """Words to the next words, with the loss inside, as transformers have it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.rnn, self.dropout = nn.GRU(8, 8, batch_first=True), nn.Dropout(dropout)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.dropout(self.rnn(self.dropout(self.words(ids)))[0]))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "logits": logits}


def ids() -> Tensor:
    return torch.randint(0, WORDS, (N, TOKENS))


def padded() -> Tensor:
    targets = ids()
    for row in range(N):
        targets[row, 1 + row % TOKENS :] = -100
    return targets


def ragged() -> list[Tensor]:
    """Images of different heights, one of them as high as the batch has samples."""
    return [torch.randn(3, 4 + row % 9, 5) for row in range(N)]
