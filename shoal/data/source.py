"""What every data set hands over, and what samples look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.utils.data import Dataset


@dataclass(frozen=True)
class Source:
    """A data set, split in two.

    Both datasets are map-style and sized. `dataset[i]` gives `(input, target)`: for classification a float32 tensor
    of `input_shape` and an int (or a float32 vector of `num_classes` probabilities where samples are mixed); for
    language two int64 tensors of `input_shape`, the target being the input shifted by one. Randomness is drawn from
    torch's default generator only; the loader seeds it for each sample, so that a sample is a function of
    (seed, epoch, index) alone. A dataset without randomness may offer `batch(indices: list[int]) -> tuple[Tensor, ...]`,
    which gives the collated batch at once and is used instead of `dataset[i]`.
    """

    train: Dataset
    validation: Dataset
    task: Literal["classification", "language"]
    num_classes: int
    input_shape: tuple[int, ...]
