"""Data sets for tiny_jobs.py, registered as a user's own would be: `--plugin tiny_data.py`.

`data.path`, which changes no number, says where they leave notes about themselves.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from shoal.config.job import DataConfig
from shoal.data.source import Source

CLASSES = 6
VALIDATION_SAMPLES = 25


class Noisy(Dataset):
    """Images with new noise each time that one is fetched: the simplest augmentation."""

    def __init__(self, clean: Dataset) -> None:
        self.clean = clean

    def __len__(self) -> int:
        return len(self.clean)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.clean[index]
        return image + 0.3 * torch.randn(image.shape), label


class Recorded(Dataset):
    """Writes down which samples are fetched, in the file `path`, whole lines at a time."""

    def __init__(self, samples: Dataset, path: Path) -> None:
        self.samples, self.path = samples, path

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, f"{index}\n".encode())
        os.close(file)
        return self.samples[index]


class Patient(Dataset):
    """Waits for a SIGTERM, once in a rank's life, before its tenth sample; the file `waiting.PID`
    says when.

    A signal that comes from outside so meets a run in its middle, however fast that is. Ranks that
    start when there are such files already do not wait, unless there is a file `again` too."""

    def __init__(self, samples: Dataset, directory: Path) -> None:
        self.samples, self.directory = samples, directory
        has_waited = any(directory.glob("waiting.*")) and not (directory / "again").exists()
        self.left = 0 if has_waited else 10

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.left == 1:
            self.wait()
        self.left -= 1
        return self.samples[index]

    def wait(self) -> None:
        told: list[int] = []
        inner: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(
            signal.SIGTERM, lambda number, frame: (told.append(number), inner(number, frame))
        )
        (self.directory / f"waiting.{os.getpid()}").touch()
        while not told:
            time.sleep(0.01)


def images(samples: int, seed: int) -> TensorDataset:
    """Float32 (samples, 1, 8, 8), brighter the higher the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    pixels = torch.randn(samples, 1, 8, 8, generator=generator) + labels[:, None, None, None]
    return TensorDataset(pixels, labels)


def tokens(samples: int, seed: int) -> TensorDataset:
    """Int64 (samples, 6), and the same one token later."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(CLASSES, (samples, 7), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


def load_noisy(config: DataConfig, seed: int) -> Source:
    train, validation = Noisy(images(config.samples, seed)), images(VALIDATION_SAMPLES, seed + 1)
    return Source(train, validation, "classification", CLASSES, (1, 8, 8))


def load_recorded(config: DataConfig, seed: int) -> Source:
    train = images(config.samples, seed)
    dataset = Recorded(train, Path(config.path)) if config.path else train
    return Source(
        dataset, images(VALIDATION_SAMPLES, seed + 1), "classification", CLASSES, (1, 8, 8)
    )


def load_patient(config: DataConfig, seed: int) -> Source:
    train = images(config.samples, seed)
    dataset = Patient(train, Path(config.path)) if config.path else train
    return Source(
        dataset, images(VALIDATION_SAMPLES, seed + 1), "classification", CLASSES, (1, 8, 8)
    )


def load_seen(config: DataConfig, seed: int) -> Source:
    """Recorded in the file `seen` of a directory, and patient on rank 0, so that no other rank
    goes ahead.
    """
    folder = Path(config.path)
    recorded = Recorded(images(config.samples, seed), folder / "seen")
    train = Patient(recorded, folder) if os.environ.get("RANK", "0") == "0" else recorded
    return Source(train, images(VALIDATION_SAMPLES, seed + 1), "classification", CLASSES, (1, 8, 8))


def load_bright(config: DataConfig, seed: int) -> Source:
    pixels, labels = images(config.samples, seed).tensors
    validation = images(VALIDATION_SAMPLES, seed + 1)
    return Source(
        TensorDataset(1e4 * pixels, labels), validation, "classification", CLASSES, (1, 8, 8)
    )


def load_tokens(config: DataConfig, seed: int) -> Source:
    return Source(
        tokens(config.samples, seed),
        tokens(VALIDATION_SAMPLES, seed + 1),
        "language",
        CLASSES,
        (6,),
    )


data = {
    "bright": load_bright,
    "noisy": load_noisy,
    "patient": load_patient,
    "recorded": load_recorded,
    "seen": load_seen,
    "tokens": load_tokens,
}
