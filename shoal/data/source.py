"""The interface of every data set, and the form of its samples."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.utils.data import Dataset


class Batched(Dataset):
    """A data set without randomness that returns a collated batch at once: many times faster than
    sample by sample.
    """

    @abstractmethod
    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return the same as `default_collate([self[i] for i in indices])`."""


@dataclass(frozen=True)
class Source:
    """A training and a validation data set, both map-style and sized.

    `dataset[i]` is `(input, target)`. For classification: a float32 tensor of `input_shape` and an
    int, or a float32 vector of `num_classes` probabilities where samples are mixed. For language:
    two int64 tensors of `input_shape`; the target is the input shifted by one. All randomness comes
    from torch's default generator. The loader seeds it for each sample, so a sample is a function
    of (seed, epoch, index) alone.
    """

    train: Dataset
    validation: Dataset
    task: Literal["classification", "language"]
    num_classes: int
    input_shape: tuple[int, ...]
