"""CIFAR as torchvision reads it."""

from pathlib import Path

import numpy as np
import pytest
import small_cifar
import torch

from shoal.config.job import DataConfig
from shoal.data import load
from shoal.data.source import Source
from shoal.errors import DataError


def loaded(name: str, root: Path, **settings: bool) -> Source:
    with small_cifar.any_checksum():
        return load(DataConfig(name=name, path=str(root), **settings), seed=0)


@pytest.mark.parametrize(
    ("name", "classes", "train"), [("cifar10", 10, range(5)), ("cifar100", 100, range(1))]
)
def test_images_and_labels_come_in_the_order_of_the_files(
    tmp_path: Path, name: str, classes: int, train: range
) -> None:
    small_cifar.write(name, tmp_path)
    source = loaded(name, tmp_path, augment=False)
    assert (source.task, source.num_classes) == ("classification", classes)
    assert source.input_shape == (3, 32, 32)
    for dataset, seeds in ((source.train, train), (source.validation, [len(train)])):
        pixels = np.concatenate([small_cifar.arrays(seed, classes)[0] for seed in seeds])
        labels = np.concatenate([small_cifar.arrays(seed, classes)[1] for seed in seeds])
        assert np.array_equal(dataset.pixels.numpy().reshape(-1, 3072), pixels)
        assert dataset.labels.tolist() == labels.tolist()


def test_training_images_are_augmented_and_validation_images_are_not(tmp_path: Path) -> None:
    small_cifar.write("cifar10", tmp_path)
    source = loaded("cifar10", tmp_path)
    assert source.train[0][0].shape == (3, 32, 32)
    assert not hasattr(source.train, "batch")
    assert len({float(source.train[0][0].sum()) for _ in range(10)}) > 1
    assert torch.equal(source.validation[0][0], source.validation.batch([0])[0][0])
    assert source.train[0][0].dtype == source.validation[0][0].dtype == torch.float32


@pytest.mark.parametrize("kind", ["missing", "one file missing", "binary version", "other content"])
def test_files_that_are_not_the_published_ones_say_what_belongs_where(
    tmp_path: Path, kind: str
) -> None:
    if kind == "binary version":
        (tmp_path / "cifar-10-batches-bin").mkdir()
        (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(bytes(3073))
    elif kind != "missing":
        folder = small_cifar.write("cifar10", tmp_path)
        if kind == "one file missing":
            (folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match=r"cifar10: .* is missing or damaged") as caught:
        load(DataConfig(name="cifar10", path=str(tmp_path)), seed=0)
    assert f"{tmp_path / 'cifar-10-batches-py'}/ is missing" in str(caught.value)
    assert f"tar xf cifar-10-python.tar.gz -C {tmp_path}" in str(caught.value)


def test_without_a_path_it_is_looked_for_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="cifar100: data/cifar100/cifar-100-python/ is missing"):
        load(DataConfig(name="cifar100"), seed=0)
