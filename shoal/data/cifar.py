"""`cifar10` and `cifar100`: 60,000 photographs of 32 x 32 pixels in 10 or 100 classes.

torchvision reads them. The files are pickles, and it compares their checksums with those of the
published ones first.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.config.job import DataConfig
from shoal.data.images import Augmented, Images
from shoal.data.source import Source
from shoal.errors import DataError
from shoal.platform.torchvision_import import torchvision

# CIFAR-10's training images, for red, green and blue from 0 to 1. CIFAR-100 differs by less than
# 0.03.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def load(config: DataConfig, seed: int) -> Source:
    """Return CIFAR-10 or CIFAR-100, by `config.name`: float32 (3, 32, 32). `seed` is not used.

    Raises: DataError: it is not in `config.path`, or a file is missing or damaged.
    """
    datasets = torchvision.datasets
    kind = datasets.CIFAR10 if config.name == "cifar10" else datasets.CIFAR100
    root = Path(config.path or f"data/{config.name}").expanduser()
    try:
        train, validation = (_images(kind(str(root), train=split)) for split in (True, False))
    except RuntimeError as error:
        raise DataError(
            f"{config.name}: {root / kind.base_folder}/ is missing or damaged. It is the content "
            f"of {kind.filename} ({kind.url}), the python version: tar xf {kind.filename} -C "
            f"{root} (data.path says where to look)."
        ) from error
    classes = 10 if config.name == "cifar10" else 100
    augmented = Augmented(train) if config.augment else train
    return Source(augmented, validation, "classification", classes, (3, 32, 32))


def _images(split: Any) -> Images:
    pixels = torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous()
    mean, std = ([255 * value for value in values] for values in (MEAN, STD))
    return Images(pixels, torch.tensor(split.targets), mean, std)
