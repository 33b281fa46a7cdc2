"""Small files in the real formats: those that Python 2 pickled, and those of records."""

import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.config.job import DataConfig
from shoal.data import load
from shoal.errors import DataError

NUMBER = 4
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]


class Command:
    """Unpickled by the usual means, this runs a program."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def arrays(seed: int, classes: int) -> tuple[np.ndarray, list[int]]:
    random = np.random.RandomState(seed)
    return random.randint(0, 256, (NUMBER, 3072)).astype(np.uint8), random.randint(
        0, classes, NUMBER
    ).tolist()


def python2_text(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def python2_pickle(pixels: np.ndarray, labels: dict[bytes, list[int]]) -> bytes:
    """Opcode by opcode what Python 2.7's cPickle wrote at protocol 2, in which CIFAR is
    distributed.
    """
    content = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
        + python2_text(b"b")
        + b"\x87R"
    )
    kind = b"cnumpy\ndtype\n" + python2_text(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + python2_text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = (
        b"M"
        + struct.pack("<H", pixels.shape[0])
        + b"M"
        + struct.pack("<H", pixels.shape[1])
        + b"\x86"
    )
    array += b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"
    items = (
        python2_text(b"batch_label")
        + python2_text(b"training batch 1 of 5")
        + python2_text(b"data")
        + array
    )
    for key, values in labels.items():
        items += (
            python2_text(key) + b"](" + b"".join(b"K" + bytes([value]) for value in values) + b"e"
        )
    items += (
        python2_text(b"filenames")
        + b"]("
        + python2_text(b"camion_s_000148.png") * len(pixels)
        + b"e"
    )
    return b"\x80\x02}(" + items + b"u."


def files(name: str, version: str) -> dict[str, bytes]:
    """Path in the archive -> content."""
    if name == "cifar10":
        folder = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}[version]
        names, classes = [*TRAIN, "test_batch"], 10
    else:
        folder, names, classes = f"cifar-100-{version}", ["train", "test"], 100
    contents = {}
    for seed, file in enumerate(names):
        pixels, labels = arrays(seed, classes)
        if version == "python":
            keys = (
                {b"labels": labels}
                if name == "cifar10"
                else {b"coarse_labels": [1] * NUMBER, b"fine_labels": labels}
            )
            contents[f"{folder}/{file}"] = python2_pickle(pixels, keys)
        else:
            coarse = b"" if name == "cifar10" else b"\x01"
            records = [
                coarse + bytes([label]) + image.tobytes()
                for image, label in zip(pixels, labels, strict=True)
            ]
            contents[f"{folder}/{file}.bin"] = b"".join(records)
    return contents


def archive_name(name: str, version: str) -> str:
    return f"{name.replace('cifar', 'cifar-')}-{version}.tar.gz"


def write(root: Path, contents: dict[str, bytes]) -> None:
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def write_archive(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def cifar10(root: Path, **settings):
    return load(DataConfig(name="cifar10", path=str(root), **settings), seed=0)


def test_the_test_writes_what_an_unrestricted_pickle_reads():
    pixels, labels = arrays(0, 10)
    found = pickle.loads(python2_pickle(pixels, {b"labels": labels}), encoding="bytes")
    assert np.array_equal(found[b"data"], pixels)
    assert found[b"labels"] == labels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("version", ["python", "binary"])
@pytest.mark.parametrize(
    ("name", "classes", "train"), [("cifar10", 10, range(5)), ("cifar100", 100, range(1))]
)
def test_every_form_of_the_archive_gives_the_same_images(
    tmp_path, name, classes, train, version, packed
):
    if packed:
        write_archive(tmp_path / archive_name(name, version), files(name, version))
    else:
        write(tmp_path, files(name, version))
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
    write(tmp_path, files("cifar10", "python"))
    assert len(cifar10(tmp_path / "cifar-10-batches-py").train) == 5 * NUMBER


def test_training_images_are_augmented_and_validation_images_are_not(tmp_path):
    write(tmp_path, files("cifar10", "binary"))
    source = cifar10(tmp_path)
    assert source.train[0][0].shape == (3, 32, 32)
    assert not hasattr(source.train, "batch")
    assert len({float(source.train[0][0].sum()) for _ in range(10)}) > 1
    assert torch.equal(source.validation[0][0], source.validation.batch([0])[0][0])
    assert source.train[0][0].dtype == source.validation[0][0].dtype == torch.float32


def test_a_missing_data_set_says_which_file_of_what_size_belongs_where(tmp_path):
    with pytest.raises(DataError) as caught:
        cifar10(tmp_path)
    assert f"{tmp_path / 'cifar-10-python.tar.gz'} (163 MB)" in str(caught.value)
    assert f"{tmp_path / 'cifar-10-batches-bin'}/" in str(caught.value)


def test_without_a_path_it_is_looked_for_under_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"cifar100: it is not in data/cifar100\."):
        load(DataConfig(name="cifar100"), seed=0)


@pytest.mark.parametrize("packed", [False, True])
def test_all_missing_files_are_named_at_once(tmp_path, packed):
    contents = files("cifar10", "python")
    del contents["cifar-10-batches-py/data_batch_3"], contents["cifar-10-batches-py/test_batch"]
    if packed:
        write_archive(tmp_path / "cifar-10-python.tar.gz", contents)
    else:
        write(tmp_path, contents)
    with pytest.raises(
        DataError, match=r"lacks data_batch_3, test_batch\. Get cifar-10-python\.tar\.gz anew"
    ):
        cifar10(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 100, 3073 * 2 + 5])
@pytest.mark.parametrize(
    ("version", "file"), [("python", "data_batch_2"), ("binary", "data_batch_2.bin")]
)
def test_a_truncated_file_is_named(tmp_path, version, file, kept):
    contents = files("cifar10", version)
    write(
        tmp_path,
        {
            path: content[:kept] if path.endswith(file) else content
            for path, content in contents.items()
        },
    )
    with pytest.raises(DataError, match=rf"{file} is damaged"):
        cifar10(tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_archive_is_named_with_its_usual_size(tmp_path, kept):
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, files("cifar10", "binary"))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is damaged .*162 MB"):
        cifar10(tmp_path)


def test_an_archive_with_a_flipped_byte_is_refused(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, files("cifar10", "binary"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        cifar10(tmp_path)


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    trace = tmp_path / "ran"
    contents = files("cifar10", "python") | {
        "cifar-10-batches-py/data_batch_1": pickle.dumps(Command(trace))
    }
    write(tmp_path, contents)
    with pytest.raises(
        DataError,
        match=r"data_batch_1 is damaged: it asks for pathlib(\._local)?\.Path\.touch"
        r"|it asks for .*getattr",
    ):
        cifar10(tmp_path)
    assert not trace.exists()


def test_a_member_that_points_out_of_the_archive_goes_nowhere(tmp_path):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    evil = {
        "../x": b"gone",
        "/tmp/shoal_x": b"gone",
        "../cifar-10-batches-bin/test_batch.bin": b"gone",
    }
    path = inside / "cifar-10-binary.tar.gz"
    write_archive(
        path, evil | files("cifar10", "binary") | {"cifar-10-batches-bin/../../y": b"gone"}
    )
    assert len(cifar10(inside).validation) == NUMBER
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path]
    assert not Path("/tmp/shoal_x").exists()


def test_a_link_in_the_archive_is_not_followed(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    contents = files("cifar10", "binary")
    test = contents.pop("cifar-10-batches-bin/test_batch.bin")
    (tmp_path / "secret").write_bytes(test)
    write_archive(path, contents)
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        tar.addfile(link)
    with pytest.raises(DataError, match=r"lacks .*test_batch"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps([1, 2]), "it holds no dict"),
        (pickle.dumps({"data": 1, "labels": [1]}), "no array 'data' and list 'labels'"),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, "x"]}),
            "something else than classes",
        ),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}),
            r"the shape \(2, 3072\) and its labels",
        ),
        (
            pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}),
            "class 10, and classes end at 9",
        ),
        (pickle.dumps({"data": np.zeros((0, 3072), np.uint8), "labels": []}), "the shape"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}), "only bytes"),
    ],
)
def test_a_batch_of_another_form_is_refused(tmp_path, content, says):
    write(tmp_path, files("cifar10", "python") | {"cifar-10-batches-py/test_batch": content})
    with pytest.raises(DataError, match=rf"test_batch is damaged: .*{says}"):
        cifar10(tmp_path)


def test_a_batch_that_python_3_pickled_again_is_read_too(tmp_path):
    pixels, labels = arrays(0, 10)
    again = pickle.dumps({"data": pixels, "labels": labels})
    write(tmp_path, files("cifar10", "python") | {"cifar-10-batches-py/data_batch_1": again})
    assert len(cifar10(tmp_path).train) == 5 * NUMBER
