"""The names, and the sources that need no files: digits, stdlib, dummy."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import default_collate

from shoal.config.job import DataConfig
from shoal.data import SOURCES, load, stdlib
from shoal.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def text():
    return load(DataConfig(name="stdlib", sequence_length=64), seed=0)


def test_a_source_of_the_users_own_is_found_by_its_name():
    seen = []
    own = {
        "mine": lambda config, seed: (
            seen.append((config.samples, seed)) or SOURCES["digits"](config, seed)
        )
    }
    assert load(DataConfig(name="mine", samples=7), 3, own).num_classes == 10
    assert seen == [(7, 3)]
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        load(DataConfig(name="min"), 0, own)


def test_sources_without_photographs_do_not_wait_for_torchvision():
    program = (
        "import sys; from shoal.config.job import DataConfig; "
        "from shoal.data import load; load(DataConfig(name='digits'), 0);"
        "sys.exit('torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_digits_are_split_once_and_for_all():
    source = load(DataConfig(name="digits"), seed=0)
    assert (len(source.train), len(source.validation)) == (1437, 360)
    assert (source.task, source.num_classes, source.input_shape) == (
        "classification",
        10,
        (1, 8, 8),
    )
    image, label = source.train[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == torch.float32
    assert isinstance(label, int)
    other = load(DataConfig(name="digits"), seed=99)
    assert torch.equal(other.train[0][0], image)


def test_digits_are_normalised_and_every_class_is_in_both_parts():
    source = load(DataConfig(name="digits"), seed=0)
    images, labels = source.train.batch(list(range(1437)))
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    assert (
        set(labels.tolist())
        == set(source.validation.batch(list(range(360)))[1].tolist())
        == set(range(10))
    )


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize("name", ["digits", "stdlib"])
def test_a_batch_is_its_samples_stacked(name, part):
    dataset = getattr(load(DataConfig(name=name), seed=0), part)
    indices = [3, 0, len(dataset) - 1]
    for whole, stacked in zip(
        dataset.batch(indices), default_collate([dataset[i] for i in indices]), strict=True
    ):
        assert whole.dtype == stacked.dtype
        assert whole.is_contiguous()
        assert torch.equal(whole, stacked)


def test_every_byte_of_the_text_is_predicted_once_from_the_byte_before(text):
    assert (text.task, text.num_classes, text.input_shape) == ("language", 256, (64,))
    inputs, targets = text.train.batch([0, 1])
    assert inputs.shape == targets.shape == (2, 64)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets.flatten()[:-1], inputs.flatten()[1:])
    assert torch.equal(targets.flatten(), text.train.text[1:129].long())


def test_iterating_over_windows_ends_after_the_last_one():
    windows = stdlib.Windows(torch.arange(9, dtype=torch.uint8), 4)
    assert [inputs.tolist() for inputs, _ in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(stdlib.Windows(torch.arange(8, dtype=torch.uint8), 4)) == 1


def test_one_file_in_twenty_is_for_validation():
    share = sum(stdlib.is_validation(f"module_{i}.py") for i in range(10_000)) / 10_000
    assert 0.04 < share < 0.06


def test_the_text_is_python_source_of_a_few_million_bytes(text):
    assert 5e6 < len(text.train.text) < 3e7
    assert 0.02 < len(text.validation.text) / len(text.train.text) < 0.1
    assert b"import" in bytes(text.validation.text[:100_000].tolist())


def test_what_others_installed_and_tests_and_dangling_links_are_left_out_of_the_text(tmp_path):
    for name in (
        "b.py",
        "a/c.py",
        "site-packages/d.py",
        "a/tests/e.py",
        "_sysconfigdata_x.py",
        "f.txt",
        "test/g.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    (tmp_path / "h.py").symlink_to(tmp_path / "gone.py")
    assert stdlib.source_files(tmp_path) == ["a/c.py", "b.py"]


def test_a_window_longer_than_the_text_is_refused_with_the_bytes_that_there_are():
    with pytest.raises(DataError, match=r"bytes for training .*data\.sequence_length=100,000,000"):
        load(DataConfig(name="stdlib", sequence_length=100_000_000), seed=0)


def test_dummy_samples_are_a_function_of_seed_split_and_index():
    config = DataConfig(name="dummy", shape=(2, 5), samples=20, classes=4)
    source, again, other = load(config, 1), load(config, 1), load(config, 2)
    torch.manual_seed(0)
    sample, label = source.train[7]
    torch.manual_seed(1)
    assert torch.equal(again.train[7][0], sample)
    assert again.train[7][1] == label
    for different in (other.train[7], source.validation[7], source.train[8]):
        assert not torch.equal(different[0], sample)


def test_dummy_has_the_shape_the_size_and_the_classes_that_were_asked_for():
    source = load(DataConfig(name="dummy", shape=(2, 5), samples=200, classes=4), seed=0)
    assert len(source.train) == len(source.validation) == 200
    assert (source.num_classes, source.input_shape) == (4, (2, 5))
    assert {label for _, label in source.train} == {0, 1, 2, 3}
    assert all(x.shape == (2, 5) and x.dtype == torch.float32 for x, _ in source.train)
