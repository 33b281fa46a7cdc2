"""`stdlib`: the source text of Python's own standard library, byte by byte; a text that every
machine has.

Which files: every `*.py` below the standard library's directory, in the order of their paths,
without what was installed there later (site-packages), without tests, and without what is generated
or differs from machine to machine (pydoc_data, _sysconfigdata, sitecustomize). A file belongs to
the validation set if a hash of its path says so, as it does for one in twenty; that holds for every
version of Python. The text itself does not: a run that is to be repeated elsewhere needs the same
version there. Python 3.11 has 10.9 million bytes for training and 0.5 million for validation."""

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
    """A text cut into windows that do not overlap; the next byte is to be predicted at every place.

    Args:
        text: uint8 (bytes,).
        length: bytes in a window.

    `windows[i]` is two int64 tensors (length,), the second being the first one byte later;
    `batch(indices)` is the same, stacked. What is left at the end of the text and fills no window
    is not used."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        # One byte is needed after the last window, as the target of its last place.
        return max(0, len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch([range(len(self))[index]])
        return inputs[0], targets[0]

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        starts = torch.tensor(indices).unsqueeze(1) * self.length
        places = starts + torch.arange(self.length + 1)
        windows = self.text[places].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load(config: DataConfig, seed: int) -> Source:
    """Windows of `config.sequence_length` bytes; a byte is a class. `seed` changes nothing.

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
            f"{len(texts[False]):,} bytes for "
            f"training and {len(texts[True]):,} for validation, which is not one window of "
            f"data.sequence_length={config.sequence_length:,}. Take a shorter one, or a Python "
            "that came with its "
            f"source files."
        )
    return Source(
        train, validation, "language", num_classes=256, input_shape=(config.sequence_length,)
    )


def source_files(root: Path) -> list[str]:
    """The files' paths below `root`, with `/` between their parts, in an order that does not
    depend on the disk.
    """
    paths: list[Path] = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in EXCLUDED]
        paths += [
            Path(directory, name)
            for name in files
            if name.endswith(".py") and not name.startswith(LOCAL_FILES)
        ]
    # Linux distributions are known to leave links that lead nowhere.
    return sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())


def is_validation(name: str) -> bool:
    """Whether the file of this name is for validation; says the same on every machine."""
    return int.from_bytes(sha256(name.encode()).digest()[:8]) < VALIDATION_SHARE * 2**64
