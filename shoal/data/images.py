"""Small images in memory, one byte for each pixel and channel, normalised when they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from shoal.data.source import Batched


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
