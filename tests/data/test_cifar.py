"""Small files in the real format, that of records."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.config.job import DataConfig
from shoal.data import load
from shoal.errors import DataError

NUMBER = 4
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]


def arrays(seed: int, classes: int) -> tuple[np.ndarray, list[int]]:
    random = np.random.RandomState(seed)
    return random.randint(0, 256, (NUMBER, 3072)).astype(np.uint8), random.randint(
        0, classes, NUMBER
    ).tolist()


def files(name: str) -> dict[str, bytes]:
    """Path in the archive -> content."""
    if name == "cifar10":
        folder, names, classes, coarse = "cifar-10-batches-bin", [*TRAIN, "test_batch"], 10, b""
    else:
        folder, names, classes, coarse = "cifar-100-binary", ["train", "test"], 100, b"\x01"
    contents = {}
    for seed, file in enumerate(names):
        pixels, labels = arrays(seed, classes)
        records = [
            coarse + bytes([label]) + image.tobytes()
            for image, label in zip(pixels, labels, strict=True)
        ]
        contents[f"{folder}/{file}.bin"] = b"".join(records)
    return contents


def write(root: Path, contents: dict[str, bytes]) -> None:
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def cifar10(root: Path, **settings):
    return load(DataConfig(name="cifar10", path=str(root), **settings), seed=0)


@pytest.mark.parametrize(
    ("name", "classes", "train"), [("cifar10", 10, range(5)), ("cifar100", 100, range(1))]
)
def test_images_and_labels_come_in_the_order_of_the_files(tmp_path, name, classes, train):
    write(tmp_path, files(name))
    source = load(DataConfig(name=name, path=str(tmp_path), augment=False), seed=0)
    assert (source.task, source.num_classes, source.input_shape) == (
        "classification",
        classes,
        (3, 32, 32),
    )
    for dataset, seeds in ((source.train, train), (source.validation, [len(train)])):
        pixels = np.concatenate([arrays(seed, classes)[0] for seed in seeds])
        labels = np.concatenate([arrays(seed, classes)[1] for seed in seeds])
        assert np.array_equal(dataset.pixels.numpy().reshape(-1, 3072), pixels)
        assert dataset.labels.tolist() == labels.tolist()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_path_may_be_the_unpacked_directory_itself(tmp_path):
    write(tmp_path, files("cifar10"))
    assert len(cifar10(tmp_path / "cifar-10-batches-bin").train) == 5 * NUMBER


def test_training_images_are_augmented_and_validation_images_are_not(tmp_path):
    write(tmp_path, files("cifar10"))
    source = cifar10(tmp_path)
    assert source.train[0][0].shape == (3, 32, 32)
    assert not hasattr(source.train, "batch")
    assert len({float(source.train[0][0].sum()) for _ in range(10)}) > 1
    assert torch.equal(source.validation[0][0], source.validation.batch([0])[0][0])
    assert source.train[0][0].dtype == source.validation[0][0].dtype == torch.float32


@pytest.mark.parametrize(
    "packed", [None, "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "cifar-10-batches-py/x"]
)
def test_a_missing_data_set_says_what_belongs_where(tmp_path, packed):
    write(tmp_path, {} if packed is None else {packed: b"never read"})
    with pytest.raises(DataError, match="Pickles of the python version are not read") as caught:
        cifar10(tmp_path)
    assert f"there is no {tmp_path / 'cifar-10-batches-bin'}/" in str(caught.value)
    assert f"tar xf cifar-10-binary.tar.gz -C {tmp_path}" in str(caught.value)


def test_without_a_path_it_is_looked_for_under_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="cifar100: there is no data/cifar100/cifar-100-binary/"):
        load(DataConfig(name="cifar100"), seed=0)


def test_all_missing_files_are_named_at_once(tmp_path):
    contents = files("cifar10")
    del contents["cifar-10-batches-bin/data_batch_3.bin"]
    del contents["cifar-10-batches-bin/test_batch.bin"]
    write(tmp_path, contents)
    with pytest.raises(
        DataError, match=r"lacks data_batch_3\.bin, test_batch\.bin\. Get cifar-10-binary"
    ):
        cifar10(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 100, 3073 * 2 + 5])
def test_a_truncated_file_is_named(tmp_path, kept):
    file = "data_batch_2.bin"
    contents = files("cifar10")
    write(
        tmp_path,
        {
            path: content[:kept] if path.endswith(file) else content
            for path, content in contents.items()
        },
    )
    with pytest.raises(DataError, match=rf"{file} is damaged"):
        cifar10(tmp_path)


def test_an_image_of_a_class_that_is_none_is_refused(tmp_path):
    wrong = {"cifar-10-batches-bin/test_batch.bin": bytes([10]) + bytes(3072)}
    write(tmp_path, files("cifar10") | wrong)
    with pytest.raises(
        DataError, match=r"test_batch\.bin is damaged: .*class 10, and classes end at 9"
    ):
        cifar10(tmp_path)
