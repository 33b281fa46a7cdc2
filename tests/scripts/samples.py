"""Small data sets and models of the catalog. All numbers are float64, torch's default here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 18
BATCH = 7
"""The batches have 7, 7 and 4 samples, so that no number of ranks divides them evenly."""
VOCABULARY = 12
PADDED = -100


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def integers(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=generator(seed))


def loader(*tensors: Tensor, batch_size: int = BATCH) -> DataLoader:
    """Return a loader of rows of these tensors, in order.

    Its generator is its own: each iterator draws a seed, and from the default generator that would
    change what a script draws.
    """
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, generator=generator())


class ListOfSamples(torch.utils.data.Dataset):
    """A data set of any samples: dicts, ragged tensors."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def dict_loader(columns: dict[str, Tensor], batch_size: int = BATCH) -> DataLoader:
    """Return a loader of dicts."""
    count = len(next(iter(columns.values())))
    rows = [{name: column[i] for name, column in columns.items()} for i in range(count)]
    return DataLoader(ListOfSamples(rows), batch_size=batch_size)


def images(side: int = 6, channels: int = 1, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Return images (18, channels, side, side) and labels (18,)."""
    return normal(SAMPLES, channels, side, side), integers(classes, SAMPLES)


def vectors(width: int = 6, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Return vectors (18, width) and labels (18,)."""
    return normal(SAMPLES, width), integers(classes, SAMPLES)


def sequences(length: int = 6, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Return tokens (18, length) and the next token at each position."""
    tokens = integers(vocabulary, SAMPLES, length + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def uneven_sequences(length: int = 6, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Return `sequences` whose targets are -100 after each sequence's own end."""
    tokens, targets = sequences(length, vocabulary)
    ends = integers(length, SAMPLES, 1, seed=2) + 1
    return tokens, targets.masked_fill(torch.arange(length) >= ends, PADDED)


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    """Return linear layers with tanh between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cnn(classes: int = 4, channels: int = 1, seed: int = 0) -> nn.Sequential:
    """Return a CNN of images (N, channels, 6, 6)."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def sgd(parameters: Iterable[Any], lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def built(model: type[nn.Module], *args: Any, seed: int = 0) -> Any:
    """Return a model made under a seed."""
    torch.manual_seed(seed)
    return model(*args)
