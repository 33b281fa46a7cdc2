"""What every data set hands over, and what samples look like."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.utils.data import Dataset


class Batched(Dataset):
    """A data set without randomness that gives a whole batch at once, collated: many times
    faster than one by one.
    """

    @abstractmethod
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        """What `default_collate([self[i] for i in indices])` would give."""


@dataclass(frozen=True)
class Source:
    """A data set, split in two.

    Both datasets are map-style and sized. `dataset[i]` gives `(input, target)`: for classification
    a float32 tensor of `input_shape` and an int (or a float32 vector of `num_classes` probabilities
    where samples are mixed); for language two int64 tensors of `input_shape`, the target being the
    input shifted by one. Randomness is drawn from torch's default generator only; the loader seeds
    it for each sample, so that a sample is a function of (seed, epoch, index) alone."""

    train: Dataset
    validation: Dataset
    task: Literal["classification", "language"]
    num_classes: int
    input_shape: tuple[int, ...]
