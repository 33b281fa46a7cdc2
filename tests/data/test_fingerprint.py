"""The fingerprint of a data set tells sets with other samples, or another order, apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from shoal.data.fingerprint import difference, fingerprint


class Files(Dataset):
    """Names of files with classes, as torchvision's ImageFolder keeps them."""

    def __init__(self, paths: list[Path]) -> None:
        self.samples = [(str(path), 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is fetched for a fingerprint")


class Named(Files):
    def fingerprint(self) -> str:
        return "version 2"


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


def rows(count: int, seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)))


def make_files(directory: Path, count: int) -> list[Path]:
    directory.mkdir()
    paths = [directory / f"{number}.png" for number in range(count)]
    for path in paths:
        path.write_bytes(b"image")
    return paths


def test_equal_sets_have_equal_fingerprints() -> None:
    assert difference(fingerprint(rows(500)), fingerprint(rows(500))) == ""


def test_sets_that_have_shrunk_or_grown_are_told_with_both_lengths() -> None:
    assert "shrunk: 500 samples when it was saved, 499 here" in difference(
        fingerprint(rows(500)), fingerprint(rows(499))
    )
    assert "grown" in difference(fingerprint(rows(1)), fingerprint(rows(2)))


def test_another_order_and_other_values_are_told() -> None:
    values = rows(1000).tensors[0]
    for other in (values.flip(0), values + 1, values.double()):
        assert "another order" in difference(
            fingerprint(TensorDataset(values)), fingerprint(TensorDataset(other))
        )
    half, other_half = list(range(0, 1000, 2)), list(range(1, 1000, 2))
    assert difference(
        fingerprint(Subset(rows(1000), half)), fingerprint(Subset(rows(1000), other_half))
    )


def test_files_may_move_and_may_not_change_their_names_sizes_or_order(tmp_path: Path) -> None:
    paths = make_files(tmp_path / "a", 20)
    moved = make_files(tmp_path / "b", 20)
    before = fingerprint(Files(paths))
    assert difference(before, fingerprint(Files(moved))) == ""
    assert difference(before, fingerprint(Files(paths[::-1])))
    moved[3].write_bytes(b"a larger image")
    assert difference(before, fingerprint(Files(moved)))


def test_a_method_of_the_set_replaces_all_else_and_streams_have_none() -> None:
    assert difference(fingerprint(Named([Path("a")])), fingerprint(Named([Path("b")]))) == ""
    assert fingerprint(Stream()) == {}
    assert difference({}, fingerprint(rows(3))) == ""


def test_an_array_of_names_is_a_list_of_them() -> None:
    names = [Path(f"/data/train/{index % 1000}/{index}.jpg") for index in range(1000)]
    first = fingerprint(Files(names))
    assert first["samples"] == 1000

    class Arrays(Files):
        def __init__(self, paths: list[Path]) -> None:
            super().__init__(paths)
            names: Any = np.array([str(path).encode() for path in paths])
            self.samples = names

    assert fingerprint(Arrays(names[:9])) != fingerprint(Arrays(names[1:10]))
