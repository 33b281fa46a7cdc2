"""`cifar10` and `cifar100`: 60,000 photographs of 32 x 32 pixels in 10 or 100 classes.

The binary version of the archives is read, unpacked. The python version, which torchvision reads,
holds pickles, and a pickle may run code.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.config.job import DataConfig
from shoal.data.images import Augmented, Images
from shoal.data.source import Source
from shoal.errors import DataError

PIXELS = 3 * 32 * 32
# CIFAR-10's training images, for red, green and blue from 0 to 1. CIFAR-100 differs by less than
# 0.03.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Version:
    """The files of a data set.

    Args:
        archive: the name of the archive, from which they come.
        folder: of the files in the archive.
        train, validation: names of the files.
        label_bytes: labels of each image, before its pixels; the last is the finest.
    """

    archive: str
    folder: str
    train: Sequence[str]
    validation: str
    label_bytes: int
    classes: int


VERSIONS: dict[str, Version] = {
    "cifar10": Version(
        archive="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        train=[f"data_batch_{index}.bin" for index in range(1, 6)],
        validation="test_batch.bin",
        label_bytes=1,
        classes=10,
    ),
    "cifar100": Version(
        archive="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        train=["train.bin"],
        validation="test.bin",
        label_bytes=2,
        classes=100,
    ),
}


def load(config: DataConfig, seed: int) -> Source:
    """Return CIFAR-10 or CIFAR-100, by `config.name`: float32 (3, 32, 32). `seed` is not used.

    Raises: DataError: it is not in `config.path`, or a file is missing or damaged.
    """
    root = Path(config.path or f"data/{config.name}").expanduser()
    version = VERSIONS[config.name]
    names = [*version.train, version.validation]
    folders = [
        folder
        for folder in (root / version.folder, root)
        if any((folder / name).is_file() for name in names)
    ]
    if not folders:
        raise DataError(
            f"{config.name}: there is no {root / version.folder}/. It is the content of the binary "
            f"version, {version.archive} of https://www.cs.toronto.edu/~kriz/cifar.html: tar xf "
            f"{version.archive} -C {root} (data.path says where to look). Pickles of the python "
            "version are not read."
        )
    folder = folders[0]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError(
            f"{config.name}: {folder} lacks {', '.join(missing)}. Get {version.archive} anew."
        )
    train = _images([folder / name for name in version.train], version)
    validation = _images([folder / version.validation], version)
    return Source(
        Augmented(train) if config.augment else train,
        validation,
        "classification",
        version.classes,
        (3, 32, 32),
    )


def _images(paths: Sequence[Path], version: Version) -> Images:
    records = np.concatenate([_records(path, version) for path in paths])
    pixels = torch.from_numpy(records[:, version.label_bytes :].copy()).view(-1, 3, 32, 32)
    labels = torch.from_numpy(records[:, version.label_bytes - 1].copy()).long()
    mean, std = ([255 * value for value in values] for values in (MEAN, STD))
    return Images(pixels, labels, mean, std)


def _records(path: Path, version: Version) -> np.ndarray:
    """Return the records of a file: uint8 (images, labels and pixels)."""
    record_bytes = version.label_bytes + PIXELS
    content = np.fromfile(path, np.uint8)
    problem = ""
    if not len(content) or len(content) % record_bytes:
        problem = (
            f"{len(content):,} bytes are no multiple of {record_bytes:,}, the size of an image"
        )
    else:
        largest = content.reshape(-1, record_bytes)[:, version.label_bytes - 1].max()
        if largest >= version.classes:
            problem = (
                f"it has an image of class {largest}, and classes end at {version.classes - 1}"
            )
    if problem:
        raise DataError(f"{path} is damaged: {problem}. Get {version.archive} anew.")
    return content.reshape(-1, record_bytes)
