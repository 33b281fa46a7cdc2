"""`dummy`: random tensors of any shape, for timing and experiments. Samples are made when they are
read and need no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoal.config.job import DataConfig
from shoal.data.source import Source


@dataclass(frozen=True)
class Noise(Dataset):
    """Random samples and labels. Sample i is a function of (seed, split, i) alone: float32 `shape`
    from N(0, 1), and a uniform label.

    Nothing can be learned from these samples: a model that is better than chance on the validation
    set has a bug."""

    seed: int
    split: str
    samples: int
    shape: tuple[int, ...]
    classes: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        # A sum instead of a hash would give one split the samples of a neighbouring seed.
        name = f"{self.seed} {self.split} {index}".encode()
        seed = int.from_bytes(blake2b(name, digest_size=8).digest())
        generator = torch.Generator().manual_seed(seed)
        label = int(torch.randint(self.classes, (), generator=generator))
        return torch.randn(self.shape, generator=generator), label


def load(config: DataConfig, seed: int) -> Source:
    """Return `config.samples` samples of `config.shape` for training, and as many others for
    validation.
    """
    train, validation = (
        Noise(seed, split, config.samples, config.shape, config.classes)
        for split in ("train", "validation")
    )
    return Source(train, validation, "classification", config.classes, config.shape)
