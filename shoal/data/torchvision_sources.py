"""`imagefolder`: one directory for each class, as in ImageNet.

    PATH/train/CLASS/*.JPEG
    PATH/val/CLASS/*.JPEG

Classes are numbered in the order of their names. Pillow decodes the images. The recipe is the usual
one for ImageNet. Training takes a random crop, scaled to a square and flipped with probability one
half. Validation takes the centre crop.

`cifar10` and `cifar100`: 60,000 photographs of 32 x 32 pixels in 10 or 100 classes. torchvision
reads them. The files are pickles, and it compares their checksums with those of the published ones
first.

Sources: Szegedy et al., Going Deeper with Convolutions, CVPR 2015, section 6, for the random crop;
A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from struct import error as StructError
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from shoal.config.job import DataConfig
from shoal.data.images import Augmented, Images
from shoal.data.source import Source
from shoal.errors import DataError
from shoal.platform.torchvision_import import torchvision

# ImageNet's training images, for red, green and blue from 0 to 1.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MAX_LISTED = 5

Transform = Callable[[Image.Image], Tensor]


def decode(path: str) -> Image.Image:
    """Return the image as RGB. Raises: DataError: it cannot be read or decoded."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # Pillow's decoders raise any of these on damaged files.
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        StructError,
        Image.DecompressionBombError,
    ) as error:
        raise DataError(
            f"{path}: not an image that can be read ({error}). Replace the file, or remove it."
        ) from error


def load_imagefolder(config: DataConfig, seed: int) -> Source:
    """Return the images below `config.path`, `config.image_size` pixels square; `seed` is not used.

    Raises: DataError: a directory is missing, a class has no image, or the two splits differ in
        their classes.
    """
    root = Path(config.path or f"data/{config.name}").expanduser()
    directories = [root / config.train_split, root / config.validation_split]
    classes = _classes(directories)
    v2, size = torchvision.transforms.v2, config.image_size
    plain = _to_tensor(v2.Resize(config.resize), v2.CenterCrop(size))
    augmented = _to_tensor(v2.RandomResizedCrop(size), v2.RandomHorizontalFlip())
    transforms = (augmented if config.augment else plain, plain)
    try:
        train, validation = (
            torchvision.datasets.ImageFolder(str(directory), transform, loader=decode)
            for directory, transform in zip(directories, transforms, strict=True)
        )
    except FileNotFoundError as error:  # it names the classes without an image
        raise DataError(f"imagefolder: {error}") from error
    return Source(train, validation, "classification", len(classes), (3, size, size))


def _classes(directories: list[Path]) -> list[str]:
    """Return the sorted classes. Raises DataError: they differ between the directories."""
    missing = [str(directory) for directory in directories if not directory.is_dir()]
    if missing:
        raise DataError(
            f"imagefolder: there is no directory {' and no '.join(missing)}. One directory a class "
            f"belongs there, with its images in it: {directories[0] / 'CLASS' / 'NAME.JPEG'}. "
            "data.path, data.train_split and data.validation_split say where to look."
        )
    train, validation = (
        {entry.name for entry in os.scandir(path) if entry.is_dir()} for path in directories
    )
    if train != validation or not train:
        raise DataError(
            f"imagefolder: the classes, one directory each, must be the same in both splits.\n"
            f"  {directories[0]} has {len(train)}; only there: {_listed(train - validation)}\n"
            f"  {directories[1]} has {len(validation)}; only there: {_listed(validation - train)}\n"
            "(ImageNet's validation images come without such directories and have to be sorted "
            "into them first.)"
        )
    return sorted(train)


def _listed(names: set[str]) -> str:
    """Return at most MAX_LISTED names and the number of the others, as text."""
    shown = ", ".join(sorted(names)[:MAX_LISTED]) or "none"
    return f"{shown} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else shown


def _to_tensor(*steps: Any) -> Transform:
    v2 = torchvision.transforms.v2
    normalise = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    transform: Transform = v2.Compose([*steps, *normalise])
    return transform


# CIFAR-10's training images, for red, green and blue from 0 to 1. CIFAR-100 differs by less than
# 0.03.
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def load_cifar(config: DataConfig, seed: int) -> Source:
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
    mean, std = ([255 * value for value in values] for values in (CIFAR_MEAN, CIFAR_STD))
    return Images(pixels, torch.tensor(split.targets), mean, std)
