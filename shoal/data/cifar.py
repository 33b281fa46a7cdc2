"""`cifar10` and `cifar100`: 60,000 photographs of 32 x 32 pixels in 10 or 100 classes, from the
archives on disk.

Either version of an archive will do, packed or unpacked. A packed archive is read in memory.
Nothing is written to disk, so a malicious path in it does no harm.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from shoal.config.job import DataConfig
from shoal.data import restricted_unpickler
from shoal.data.images import Augmented, Images
from shoal.data.source import Source
from shoal.errors import DataError

# uint8 pixels (samples, PIXELS), uint8 labels (samples,)
Arrays = tuple[np.ndarray, np.ndarray]
PIXELS = 3 * 32 * 32
# CIFAR-10's training images, for red, green and blue from 0 to 1. CIFAR-100 differs by less than
# 0.03.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def from_pickle(content: bytes, label_key: str) -> Arrays:
    """Parse a file of the python version. Raises: ValueError, TypeError: it is damaged."""
    unpickled = restricted_unpickler.read(content)
    if not isinstance(unpickled, dict):
        raise ValueError("it holds no dict")
    # Python 2 wrote the keys, so they may be bytes.
    batch = {
        key.decode() if isinstance(key, bytes) else key: value for key, value in unpickled.items()
    }
    data, labels = batch.get("data"), batch.get(label_key)
    if not isinstance(data, restricted_unpickler.ByteArray) or not isinstance(labels, list):
        raise ValueError(f"it has no array 'data' and list '{label_key}'")
    if not all(isinstance(label, int) and 0 <= label < 256 for label in labels):
        raise ValueError(f"'{label_key}' holds something else than classes")
    return data.numpy(), np.array(labels, np.uint8)


def from_records(content: bytes, label_bytes: int) -> Arrays:
    """Parse a file of the binary version: one record for each image, with its labels (the finest
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
    """One form in which a data set is distributed."""

    archive: str
    size: str
    folder: str
    train: Sequence[str]
    validation: str
    parse: Callable[[bytes], Arrays]

    @property
    def names(self) -> Sequence[str]:
        return [*self.train, self.validation]


BATCHES = [f"data_batch_{index}" for index in range(1, 6)]
VERSIONS: dict[str, Sequence[Version]] = {
    "cifar10": [
        Version(
            archive="cifar-10-python.tar.gz",
            size="163 MB",
            folder="cifar-10-batches-py",
            train=BATCHES,
            validation="test_batch",
            parse=partial(from_pickle, label_key="labels"),
        ),
        Version(
            archive="cifar-10-binary.tar.gz",
            size="162 MB",
            folder="cifar-10-batches-bin",
            train=[f"{name}.bin" for name in BATCHES],
            validation="test_batch.bin",
            parse=partial(from_records, label_bytes=1),
        ),
    ],
    "cifar100": [
        Version(
            archive="cifar-100-python.tar.gz",
            size="161 MB",
            folder="cifar-100-python",
            train=["train"],
            validation="test",
            parse=partial(from_pickle, label_key="fine_labels"),
        ),
        Version(
            archive="cifar-100-binary.tar.gz",
            size="161 MB",
            folder="cifar-100-binary",
            train=["train.bin"],
            validation="test.bin",
            parse=partial(from_records, label_bytes=2),
        ),
    ],
}
CLASSES = {"cifar10": 10, "cifar100": 100}


def load(config: DataConfig, seed: int) -> Source:
    """Return CIFAR-10 or CIFAR-100, by `config.name`: float32 (3, 32, 32). `seed` is not used.

    Raises: DataError: no version of it is in `config.path`, or a file is missing or damaged.
    """
    root = Path(config.path or f"data/{config.name}").expanduser()
    version, where, contents = _find(root, config.name)
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


def _find(root: Path, name: str) -> tuple[Version, Path, Mapping[str, bytes]]:
    """Return the first version on disk, its path, and the contents of its files."""
    for version in VERSIONS[name]:
        for folder in (root / version.folder, root):
            paths = [folder / name for name in version.names if (folder / name).is_file()]
            if paths:
                return version, folder, {path.name: path.read_bytes() for path in paths}
        archive = root / version.archive
        if archive.is_file():
            return version, archive, _unpack(archive, version)
    choices = "\n".join(
        f"  {root / version.archive} ({version.size}), or its content, {root / version.folder}/"
        for version in VERSIONS[name]
    )
    raise DataError(
        f"{name}: it is not in {root}. One of these belongs there (data.path says where to look; "
        "they come from "
        f"https://www.cs.toronto.edu/~kriz/cifar.html):\n{choices}"
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
        pixels, labels = version.parse(content)
        if pixels.shape != (len(labels), PIXELS) or not len(labels):
            raise ValueError(
                f"its images have the shape {pixels.shape} and its labels {labels.shape}"
            )
        if labels.max() >= classes:
            raise ValueError(
                f"it has an image of class {labels.max()}, and classes end at {classes - 1}"
            )
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} is damaged: {error}. Get {version.archive} anew.") from error
    return pixels, labels


def _images(batches: Sequence[Arrays]) -> Images:
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    mean, std = ([255 * value for value in values] for values in (MEAN, STD))
    return Images(
        torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels).long(), mean, std
    )
