"""`stdlib`: the source text of Python's own standard library, byte by byte: a text that every
machine has.

The files are every `*.py` below the standard library's directory, in the order of their paths.
Excluded are packages installed later (site-packages), tests, and files that are generated or differ
from machine to machine (pydoc_data, _sysconfigdata, sitecustomize). A hash of its path puts one
file in twenty into the validation set, in every version of Python. The text changes with the
version, so an exact repetition on another machine needs the same version. Python 3.11 has 10.9
million bytes for training and 0.5 million for validation."""

from __future__ import annotations

import os
import sysconfig
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from shoal.config.job import DataConfig
from shoal.data.source import Batched, Source
from shoal.errors import DataError

EXCLUDED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
    "__pycache__",
}
LOCAL_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
VALIDATION_SHARE = 0.05


class Windows(Batched):
    """A text in windows that do not overlap; the task is to predict the next byte.

    Args:
        text: uint8 (bytes,).
        length: bytes in a window.

    `windows[i]` is two int64 tensors (length,); the second is the text one byte later.
    `batch(indices)` is the same, stacked. A remainder at the end of the text is not used.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        # One byte is needed after the last window, as the target of its last position.
        return max(0, len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch([range(len(self))[index]])
        return inputs[0], targets[0]

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        starts = torch.tensor(indices).unsqueeze(1) * self.length
        positions = starts + torch.arange(self.length + 1)
        windows = self.text[positions].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load(config: DataConfig, seed: int) -> Source:
    """Return windows of `config.sequence_length` bytes; a byte is a class. `seed` is not used.

    Raises: DataError: this Python came without its source text, or the text is too short for a
    single window."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {True: bytearray(), False: bytearray()}
    for name in source_files(root):
        texts[is_validation(name)] += (root / name).read_bytes()
    train, validation = (
        Windows(torch.frombuffer(text or bytearray(1), dtype=torch.uint8), config.sequence_length)
        for text in (texts[False], texts[True])
    )
    if not len(train) or not len(validation):
        raise DataError(
            f"stdlib: the source text of Python's standard library in {root} has "
            f"{len(texts[False]):,} bytes for training and {len(texts[True]):,} for validation, "
            f"which is not one window of data.sequence_length={config.sequence_length:,}. Take a "
            "shorter one, or a Python that came with its source files."
        )
    return Source(
        train, validation, "language", num_classes=256, input_shape=(config.sequence_length,)
    )


def source_files(root: Path) -> list[str]:
    """Return the files' paths below `root`, with `/` as separator, sorted: the order of the disk
    differs from machine to machine.
    """
    paths: list[Path] = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in EXCLUDED]
        paths += [
            Path(directory, name)
            for name in files
            if name.endswith(".py") and not name.startswith(LOCAL_FILES)
        ]
    # Some Linux distributions leave broken links.
    return sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())


def is_validation(name: str) -> bool:
    """Return True for files of the validation set; the same on every machine."""
    return int.from_bytes(sha256(name.encode()).digest()[:8]) < VALIDATION_SHARE * 2**64
