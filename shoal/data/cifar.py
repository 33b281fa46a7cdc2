"""`cifar10` and `cifar100`: 60,000 photographs of 32 x 32 pixels in 10 or 100 classes, from the
archives on disk.

The binary version of an archive is read, packed or unpacked. The python version holds pickles, and
a pickle may run code. A packed archive is read in memory. Nothing is written to disk, so a
malicious path in it does no harm.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from shoal.config.job import DataConfig
from shoal.data.images import Augmented, Images
from shoal.data.source import Source
from shoal.errors import DataError

# uint8 pixels (samples, PIXELS), uint8 labels (samples,)
Arrays = tuple[np.ndarray, np.ndarray]
PIXELS = 3 * 32 * 32
# CIFAR-10's training images, for red, green and blue from 0 to 1. CIFAR-100 differs by less than
# 0.03.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def from_records(content: bytes, label_bytes: int) -> Arrays:
    """Parse a file: one record for each image, with its labels (the finest
    last) and then its pixels.

    Raises: ValueError: it is damaged.
    """
    record_bytes = label_bytes + PIXELS
    if len(content) % record_bytes:
        raise ValueError(
            f"{len(content):,} bytes are no multiple of {record_bytes:,}, the size of an image"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record_bytes)
    return records[:, label_bytes:], records[:, label_bytes - 1]


@dataclass(frozen=True)
class Version:
    """The form in which a data set is read, that of records.

    Args:
        archive: the file's name.
        size: of the archive.
        folder: of its files in the archive.
        train: names of the files of training images.
        validation: the name of the file of validation images.
        label_bytes: labels of each image.
        pickled: the archive of another form, and its folder, which are not read.
    """

    archive: str
    size: str
    folder: str
    train: Sequence[str]
    validation: str
    label_bytes: int
    pickled: Sequence[str]

    @property
    def names(self) -> Sequence[str]:
        return [*self.train, self.validation]


VERSIONS: dict[str, Version] = {
    "cifar10": Version(
        archive="cifar-10-binary.tar.gz",
        size="162 MB",
        folder="cifar-10-batches-bin",
        train=[f"data_batch_{index}.bin" for index in range(1, 6)],
        validation="test_batch.bin",
        label_bytes=1,
        pickled=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
    ),
    "cifar100": Version(
        archive="cifar-100-binary.tar.gz",
        size="161 MB",
        folder="cifar-100-binary",
        train=["train.bin"],
        validation="test.bin",
        label_bytes=2,
        pickled=("cifar-100-python.tar.gz", "cifar-100-python"),
    ),
}
CLASSES = {"cifar10": 10, "cifar100": 100}


def load(config: DataConfig, seed: int) -> Source:
    """Return CIFAR-10 or CIFAR-100, by `config.name`: float32 (3, 32, 32). `seed` is not used.

    Raises: DataError: it is not in `config.path`, or a file is missing or damaged.
    """
    root = Path(config.path or f"data/{config.name}").expanduser()
    version = VERSIONS[config.name]
    where, contents = _find(root, config.name)
    missing = [name for name in version.names if name not in contents]
    if missing:
        raise DataError(
            f"{config.name}: {where} lacks {', '.join(missing)}. Get {version.archive} anew."
        )
    parsed = {
        name: _parse(version, f"{where}/{name}", contents[name], CLASSES[config.name])
        for name in version.names
    }
    train = _images([parsed[name] for name in version.train])
    validation = _images([parsed[version.validation]])
    return Source(
        Augmented(train) if config.augment else train,
        validation,
        "classification",
        CLASSES[config.name],
        (3, 32, 32),
    )


def _find(root: Path, name: str) -> tuple[Path, Mapping[str, bytes]]:
    """Return the path of the data set on disk, and the contents of its files."""
    version = VERSIONS[name]
    for folder in (root / version.folder, root):
        paths = [folder / name for name in version.names if (folder / name).is_file()]
        if paths:
            return folder, {path.name: path.read_bytes() for path in paths}
    archive = root / version.archive
    if archive.is_file():
        return archive, _unpack(archive, version)
    pickled = [found for found in version.pickled if (root / found).exists()]
    also = f" {pickled[0]} is of the python version, whose pickles are not read." if pickled else ""
    raise DataError(
        f"{name}: it is not in {root}.{also} One of these belongs there (data.path says where to "
        f"look; the binary version comes from https://www.cs.toronto.edu/~kriz/cifar.html):\n"
        f"  {archive} ({version.size}), or its content, {root / version.folder}/"
    )


def _unpack(archive: Path, version: Version) -> Mapping[str, bytes]:
    """Return the contents of the version's files in the archive; ignore all other members."""
    name_by_path = {PurePosixPath(version.folder, name): name for name in version.names}
    contents = {}
    try:
        with gzip.open(archive) as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                reader = tar.extractfile(member) if member.isfile() else None
                if reader is not None and PurePosixPath(member.name) in name_by_path:
                    contents[name_by_path[PurePosixPath(member.name)]] = reader.read()
            # gzip compares its checksum at the very end, which tarfile does not read.
            while file.read(1 << 20):
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(
            f"{archive} is damaged ({error}). It should have {version.size}; get it anew."
        ) from error
    return contents


def _parse(version: Version, where: str, content: bytes, classes: int) -> Arrays:
    try:
        pixels, labels = from_records(content, version.label_bytes)
        if not len(labels):
            raise ValueError("it has no image")
        if labels.max() >= classes:
            raise ValueError(
                f"it has an image of class {labels.max()}, and classes end at {classes - 1}"
            )
    except ValueError as error:
        raise DataError(f"{where} is damaged: {error}. Get {version.archive} anew.") from error
    return pixels, labels


def _images(batches: Sequence[Arrays]) -> Images:
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    mean, std = ([255 * value for value in values] for values in (MEAN, STD))
    return Images(
        torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels).long(), mean, std
    )
