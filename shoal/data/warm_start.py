"""Warm start: a few epochs on a part of the data, then all of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from shoal.data.seeds import derive_seed


class WarmStart(Sampler):
    """Shuffled indices: of a fixed part of the data in the first epochs, of all of it afterwards.

    Args:
        samples: in the data set.
        epochs: that see the part alone.
        fraction: of the samples that are in the part, at least one.
        seed: chooses the part; the same part in each of its epochs.
    """

    def __init__(self, samples: int, epochs: int, fraction: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, samples))
        self.samples, self.epochs, self.epoch = samples, epochs, 0
        self.part = torch.randperm(samples, generator=generator)[
            : max(1, round(samples * fraction))
        ]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.part) if self.epoch < self.epochs else self.samples

    def __iter__(self) -> Iterator[int]:
        chosen = self.part if self.epoch < self.epochs else torch.arange(self.samples)
        yield from chosen[torch.randperm(len(chosen))].tolist()
