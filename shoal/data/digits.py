"""`digits`: 1,797 handwritten digits, 8 x 8 pixels of 17 shades; the one data set that ships with
Shoal.

They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
1998, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0), as
scikit-learn's `load_digits` gives them.
`digits.npz` holds them unchanged but for their order: shuffled once, so that the first 1,437 are
the training set and the other 360 the validation set, for everyone and for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shoal.config.job import DataConfig
from shoal.data.images import Images
from shoal.data.source import Source

TRAINING_SAMPLES = 1437
# Of the training set, in shades from 0 to 16.
MEAN, STD = 4.88, 6.01


def load(config: DataConfig, seed: int) -> Source:
    """The scans as float32 (1, 8, 8). Neither argument changes anything."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        pixels = torch.from_numpy(file["images"]).unsqueeze(1)
        labels = torch.from_numpy(file["labels"]).long()
    train, validation = (
        Images(pixels[part], labels[part], [MEAN], [STD])
        for part in (slice(TRAINING_SAMPLES), slice(TRAINING_SAMPLES, None))
    )
    return Source(train, validation, "classification", num_classes=10, input_shape=(1, 8, 8))
