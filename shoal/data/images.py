"""Small images in memory, one byte for each pixel and channel, normalised when they are read; and
`digits`: 1,797 handwritten digits, 8 x 8 pixels of 17 shades; the only data set that ships with
Shoal.

The digits are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
Kaynak, 1998, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0),
as scikit-learn's `load_digits` gives them.
`digits.npz` has the images in another order: shuffled once and for all, so that the first 1,437 are
the training set and the other 360 the validation set.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from shoal.config.job import DataConfig
from shoal.data.source import Batched, Source


class Images(Batched):
    """Labelled images without randomness.

    Args:
        pixels: uint8 (samples, channels, height, width).
        labels: int64 (samples,).
        mean, std: one for each channel, in units of `pixels`.

    `images[i]` is float32 (channels, height, width) and an int; `batch(indices)` is the same,
    stacked."""

    def __init__(
        self, pixels: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.pixels, self.labels = pixels, labels
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.normalise(self.pixels[index]), int(self.labels[index])

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.normalise(self.pixels[indices]), self.labels[indices]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert uint8 (..., channels, height, width) to float32 of mean 0 and deviation 1."""
        return (pixels.float() - self.mean) / self.std


class Augmented(Dataset):
    """The same images at random offsets inside a black border, flipped with probability one half.

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2.
    """

    def __init__(self, images: Images, border: int = 4) -> None:
        self.images, self.border = images, border

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self.images.pixels[index]
        height, width = pixels.shape[-2:]
        # One draw for all three numbers: at 32 x 32 the calls cost more than the work.
        offsets = 2 * self.border + 1
        draw = int(torch.randint(2 * offsets * offsets, ()))
        flip = draw % 2
        top = draw // 2 % offsets
        left = draw // 2 // offsets
        crop = F.pad(pixels, (self.border,) * 4)[:, top : top + height, left : left + width]
        return self.images.normalise(crop.flip(-1) if flip else crop), int(
            self.images.labels[index]
        )


TRAINING_SAMPLES = 1437
# Mean and deviation of the training set, in shades from 0 to 16.
MEAN, STD = 4.88, 6.01


def load_digits(config: DataConfig, seed: int) -> Source:
    """Return the scans as float32 (1, 8, 8). Neither argument is used."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        pixels = torch.from_numpy(file["images"]).unsqueeze(1)
        labels = torch.from_numpy(file["labels"]).long()
    train, validation = (
        Images(pixels[split], labels[split], [MEAN], [STD])
        for split in (slice(TRAINING_SAMPLES), slice(TRAINING_SAMPLES, None))
    )
    return Source(train, validation, "classification", num_classes=10, input_shape=(1, 8, 8))
