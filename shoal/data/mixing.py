"""Mixup and cutmix, sample by sample, so that a mixed sample does not depend on who else is in the
batch.

The usual way mixes a batch with itself, shuffled; then the partners, and with them the numbers,
depend on how many ranks share the batch. Here each sample draws its own partner from the whole data
set. It costs a second sample read and decoded for each one that is trained on; where the loader
cannot keep up, give it more workers.

Sources: mixup: Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018, equation 1.
cutmix: Yun et al., CutMix, ICCV 2019, equations 1 and 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Beta
from torch.utils.data import Dataset

from shoal.errors import DataError


def mix_dataset(
    dataset: Dataset, num_classes: int, mixup_alpha: float, cutmix_alpha: float
) -> Dataset:
    """The data set with every sample mixed with another one.

    Args: dataset: map-style and sized; gives (float tensor, int label). num_classes: length of the
        targets. mixup_alpha, cutmix_alpha: the share of the first sample is drawn from Beta(alpha,
        alpha); 0 is off. With both
            on, each sample takes one of the two with equal chance. With both off the data set comes
            back as it is.

    Returns: a data set of (tensor of the same shape, float32 (num_classes,) of probabilities). Its
    randomness, that of `dataset` included, is drawn from torch's default generator."""
    if mixup_alpha == 0 and cutmix_alpha == 0:
        return dataset
    return Mixed(dataset, num_classes, mixup_alpha, cutmix_alpha)


class Mixed(Dataset):
    """What `mixed` gives; at least one alpha is greater than 0."""

    def __init__(
        self, dataset: Any, num_classes: int, mixup_alpha: float, cutmix_alpha: float
    ) -> None:
        self.dataset, self.num_classes = dataset, num_classes
        # The chance of cutmix is 0, 1 or, where both are on, one half.
        self.cutmix_chance = (cutmix_alpha > 0) / ((mixup_alpha > 0) + (cutmix_alpha > 0))
        # Validating the distribution costs more than drawing from it, and the alphas were checked.
        self.mixup_share, self.cutmix_share = (
            Beta(torch.tensor(alpha).double(), torch.tensor(alpha).double(), validate_args=False)
            for alpha in (mixup_alpha or 1.0, cutmix_alpha or 1.0)
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        partner = int(torch.randint(len(self), ()))
        cut = bool(torch.rand(()) < self.cutmix_chance)
        share = float((self.cutmix_share if cut else self.mixup_share).sample())
        (first, label), (second, other_label) = self.dataset[index], self.dataset[partner]
        if cut:
            sample, share = cutmix(first, second, share)
        else:
            sample = first * share + second * (1 - share)
        target = torch.zeros(self.num_classes)
        target[label] += share
        target[other_label] += 1 - share
        return sample, target


def cutmix(first: Tensor, second: Tensor, share: float) -> tuple[Tensor, float]:
    """`first` with a rectangle of `second` in it.

    Args: first, second: (..., height, width). share: of `first`. The rectangle has the image's
        proportions and a centre drawn uniformly; what of it lies
            outside of the image is cut off.

    Returns: the new image, and the share of its area that is really of `first`.
    """
    if first.dim() < 3:
        raise DataError(
            "cutmix pastes rectangles and needs images (channels, height, width); the samples of "
            "this data set have "
            f"the shape {tuple(first.shape)}. Set train.cutmix=0; train.mixup works with any shape."
        )
    height, width = first.shape[-2:]
    side = (1 - share) ** 0.5
    middle_y, middle_x = int(torch.randint(height, ())), int(torch.randint(width, ()))
    half_y, half_x = int(height * side) // 2, int(width * side) // 2
    rows = slice(max(0, middle_y - half_y), min(height, middle_y + half_y))
    columns = slice(max(0, middle_x - half_x), min(width, middle_x + half_x))
    image = first.clone()
    image[..., rows, columns] = second[..., rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return image, 1 - area / (height * width)
