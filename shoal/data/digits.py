"""`digits`: 1,797 handwritten digits, 8 x 8 pixels of 17 shades; the only data set that ships
with Shoal.

The images are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
Kaynak, 1998, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0),
as scikit-learn's `load_digits` gives them.
`digits.npz` has the images in another order: shuffled once and for all, so that the first 1,437 are
the training set and the other 360 the validation set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shoal.config.job import DataConfig
from shoal.data.images import Images
from shoal.data.source import Source

TRAINING_SAMPLES = 1437
# Mean and deviation of the training set, in shades from 0 to 16.
MEAN, STD = 4.88, 6.01


def load(config: DataConfig, seed: int) -> Source:
    """Return the scans as float32 (1, 8, 8). Neither argument is used."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        pixels = torch.from_numpy(file["images"]).unsqueeze(1)
        labels = torch.from_numpy(file["labels"]).long()
    train, validation = (
        Images(pixels[split], labels[split], [MEAN], [STD])
        for split in (slice(TRAINING_SAMPLES), slice(TRAINING_SAMPLES, None))
    )
    return Source(train, validation, "classification", num_classes=10, input_shape=(1, 8, 8))
