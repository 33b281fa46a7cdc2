"""Fingerprints of data sets, by which a resumed run sees that its samples are others.

A position in an epoch means something only in the same data: of a set that has shrunk, grown or
changed its order, some samples would come twice and others never, without an error. No sample is
fetched for a fingerprint: that may be slow, or leave traces. It looks at what a data set keeps:

      tensors, arrays     shapes, dtypes and some rows
      names of files      all of them, relative to their directory, and the sizes of some
      other data sets     theirs
      `fingerprint()`     a method of the data set's own, whose text replaces all that
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

ROWS = 256
"""Rows of a tensor, and sizes of files, that a fingerprint looks at, evenly spaced."""
DEPTH = 5
"""Data sets inside each other that are looked into."""

Fingerprint = Mapping[str, Any]
"""JSON values: `samples`, the length; `digest`, of what the data set keeps; empty if unknown."""


def fingerprint(dataset: Any) -> Fingerprint:
    """Return the fingerprint of a map-style data set; empty for one without a length."""
    try:
        samples = len(dataset)
    except TypeError:
        return {}
    digest = hashlib.blake2b(digest_size=8)
    parts = 0
    for part in _parts(dataset, DEPTH):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
        parts += 1
    return {"samples": samples, "digest": digest.hexdigest() if parts else ""}


def difference(saved: Fingerprint, here: Fingerprint) -> str:
    """Return in which way two data sets differ; empty if they do not, as far as is known."""
    if not saved or not here:
        return ""
    before, now = saved["samples"], here["samples"]
    if before != now:
        change = "grown" if now > before else "shrunk"
        return f"the data set has {change}: {before:,} samples when it was saved, {now:,} here"
    if saved["digest"] and here["digest"] and saved["digest"] != here["digest"]:
        return (
            f"the data set has {now:,} samples as before, but other ones or in another order "
            f"(fingerprint {saved['digest']} when it was saved, {here['digest']} here)"
        )
    return ""


def _parts(dataset: Any, depth: int) -> Iterator[bytes]:
    """Yield what tells a data set from another one, piece by piece."""
    own = getattr(dataset, "fingerprint", None)
    if callable(own):
        yield str(own()).encode()
        return
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, Dataset):  # a data set in another one is the same data
            yield from _parts_of(value, depth)
            continue
        for part in _parts_of(value, depth):
            yield name.encode()
            yield part


def _parts_of(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield from _tensor(value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "SU":
        yield from _names([os.fsdecode(item) for item in value.ravel().tolist()])
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield from _array(value)
    elif isinstance(value, (bytes, bytearray)):
        yield from _array(np.frombuffer(value, dtype=np.uint8))
    elif isinstance(value, Dataset):
        if depth:
            yield from _parts(value, depth - 1)
    elif isinstance(value, (list, tuple)):
        yield from _sequence(value, depth)


def _sequence(values: Sequence[Any], depth: int) -> Iterator[bytes]:
    """Yield the parts of a list: of tensors, data sets, names, (name, class), or numbers."""
    if not values:
        return
    first = values[0]
    if isinstance(first, (Tensor, np.ndarray, Dataset)):
        for value in values[:ROWS]:
            yield from _parts_of(value, depth)
    elif isinstance(first, (str, os.PathLike)):
        yield from _names([str(value) for value in values])
    elif isinstance(first, (int, float)):
        yield repr([*map(_number, values)]).encode()
    elif isinstance(first, tuple) and first and isinstance(first[0], (str, os.PathLike)):
        yield from _names([str(value[0]) for value in values])
        yield repr([_number(value[1]) for value in values if len(value) > 1]).encode()


def _number(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else None


def _tensor(tensor: Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
    chosen = torch.from_numpy(_spaced(len(rows))).to(rows.device)
    yield rows[chosen][:, :ROWS].contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _array(array: np.ndarray) -> Iterator[bytes]:
    yield f"{array.dtype} {array.shape}".encode()
    if array.size:
        rows = array.reshape(len(array) if array.ndim else 1, -1)
        yield np.ascontiguousarray(rows[_spaced(len(rows))][:, :ROWS]).tobytes()


def _names(names: list[str]) -> Iterator[bytes]:
    """Yield names relative to their common directory, so that it may move, and sizes of files."""
    # The characters that all have: names need not be paths, and are cut behind a slash.
    start = os.path.commonprefix(names).rfind("/") + 1  # noqa: RUF071
    yield "\n".join(name[start:] for name in names).encode(errors="surrogateescape")
    yield repr([_size(names[index]) for index in _spaced(len(names))]).encode()


def _size(name: str) -> int:
    try:
        return os.stat(name).st_size
    except (OSError, ValueError):
        return -1


def _spaced(count: int) -> np.ndarray:
    """Return at most ROWS different indices, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, ROWS)).astype(np.int64))
