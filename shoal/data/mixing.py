"""Mixup and cutmix, sample by sample, so that a mixed sample does not depend on the rest of its
batch.

The usual way mixes a batch with itself, shuffled. Then the partners, and with them the losses,
depend on the number of ranks. Here each sample draws its own partner from the full data set. The
cost: two samples are read and decoded for each training sample. If the loader becomes the
bottleneck, give it more workers.

Sources: mixup: Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018, equation 1.
cutmix: Yun et al., CutMix, ICCV 2019, equations 1 and 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Beta
from torch.utils.data import Dataset

from shoal.errors import DataError


class Mixed(Dataset):
    """A data set in which every sample is mixed with another sample.

    Its items are a tensor of the same shape, and float32 (num_classes,) of probabilities. All
    randomness, that of `dataset` included, comes from torch's default generator.

    Args:
        dataset: map-style and sized; its items are (float tensor, int label).
        num_classes: length of the targets.
        mixup_alpha, cutmix_alpha: the share of the first sample is drawn from Beta(alpha, alpha);
            0 is off; one is on at least. With both on, each sample takes one of the two with equal
            chance.
    """

    def __init__(
        self, dataset: Any, num_classes: int, mixup_alpha: float, cutmix_alpha: float
    ) -> None:
        self.dataset = dataset
        self.num_classes = num_classes
        # 0, 1 or, with both on, one half.
        self.cutmix_chance = (cutmix_alpha > 0) / ((mixup_alpha > 0) + (cutmix_alpha > 0))
        # To validate the distribution costs more than a draw, and the config checked the alphas.
        self.mixup_share, self.cutmix_share = (
            Beta(torch.tensor(alpha).double(), torch.tensor(alpha).double(), validate_args=False)
            for alpha in (mixup_alpha or 1.0, cutmix_alpha or 1.0)
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        partner = int(torch.randint(len(self), ()))
        use_cutmix = bool(torch.rand(()) < self.cutmix_chance)
        share = float((self.cutmix_share if use_cutmix else self.mixup_share).sample())
        (first, label), (second, other_label) = self.dataset[index], self.dataset[partner]
        if use_cutmix:
            sample, share = cutmix(first, second, share)
        else:
            sample = first * share + second * (1 - share)
        target = torch.zeros(self.num_classes)
        target[label] += share
        target[other_label] += 1 - share
        return sample, target


def cutmix(first: Tensor, second: Tensor, share: float) -> tuple[Tensor, float]:
    """Paste a rectangle of `second` into a copy of `first`.

    Args:
        first, second: (..., height, width).
        share: the share of `first` before clipping. The rectangle has the image's proportions and a
            uniform centre, and is clipped to the image.

    Returns:
        The new image, and the share of its area that comes from `first` after clipping.
    """
    if first.dim() < 3:
        raise DataError(
            "cutmix pastes rectangles and needs images (channels, height, width); the samples of "
            f"this data set have the shape {tuple(first.shape)}. Set train.cutmix=0; train.mixup "
            "works with any shape."
        )
    height, width = first.shape[-2:]
    side = (1 - share) ** 0.5
    middle_y = int(torch.randint(height, ()))
    middle_x = int(torch.randint(width, ()))
    half_y = int(height * side) // 2
    half_x = int(width * side) // 2
    rows = slice(max(0, middle_y - half_y), min(height, middle_y + half_y))
    columns = slice(max(0, middle_x - half_x), min(width, middle_x + half_x))
    image = first.clone()
    image[..., rows, columns] = second[..., rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return image, 1 - area / (height * width)
