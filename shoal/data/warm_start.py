"""Warm start: a few epochs on a subset of the data, then all of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from shoal.data.seeds import derive_seed


class WarmStart(Sampler):
    """Shuffled indices: of a fixed subset of the data in the first epochs, then of all of it.

    Args:
        samples: in the data set.
        epochs: number of epochs that use the subset.
        fraction: share of the samples that are in the subset, at least one sample.
        seed: chooses the subset; it is the same in each of its epochs.
    """

    def __init__(self, samples: int, epochs: int, fraction: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, samples))
        self.samples = samples
        self.epochs = epochs
        self.epoch = 0
        self.subset = torch.randperm(samples, generator=generator)[
            : max(1, round(samples * fraction))
        ]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.subset) if self.epoch < self.epochs else self.samples

    def __iter__(self) -> Iterator[int]:
        chosen = self.subset if self.epoch < self.epochs else torch.arange(self.samples)
        yield from chosen[torch.randperm(len(chosen))].tolist()
