"""Directories of small images, as Pillow writes them."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from shoal.config.job import DataConfig
from shoal.data import load
from shoal.errors import DataError

COLOURS = {"n01_tench": (255, 0, 0), "n02_shark": (0, 255, 0), "n03_ray": (0, 0, 255)}


@pytest.fixture
def root(tmp_path):
    for split, number in (("train", 3), ("val", 2)):
        for name, colour in COLOURS.items():
            directory = tmp_path / split / name
            directory.mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (40 + 8 * i, 30), colour).save(
                    directory / f"{name}_{i}.JPEG", quality=95
                )
    return tmp_path


def images(root: Path, **settings):
    return load(
        DataConfig(
            name="imagefolder", path=str(root), **{"image_size": 16, "resize": 20} | settings
        ),
        seed=0,
    )


def test_classes_are_numbered_in_the_order_of_their_names(root):
    source = images(root)
    assert (source.task, source.num_classes, source.input_shape) == (
        "classification",
        3,
        (3, 16, 16),
    )
    assert [label for _, label in (source.train[i] for i in range(len(source.train)))] == [
        0
    ] * 3 + [1] * 3 + [2] * 3
    assert len(source.validation) == 6


def test_images_are_float32_of_the_size_asked_for_and_normalised(root):
    for dataset in (images(root).train, images(root).validation):
        image, label = dataset[4]
        assert isinstance(label, int)
        assert image.shape == (3, 16, 16)
        assert image.dtype == torch.float32
        colour = torch.zeros(3)
        colour[label] = 1
        expected = (colour - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
            [0.229, 0.224, 0.225]
        )
        torch.testing.assert_close(image.mean((1, 2)), expected, atol=0.05, rtol=0)


def test_grey_palette_transparent_and_cmyk_images_become_rgb(root):
    directory = root / "val" / "n01_tench"
    for mode, ending in (
        ("L", "png"),
        ("P", "png"),
        ("RGBA", "png"),
        ("1", "png"),
        ("CMYK", "jpg"),
        ("I;16", "png"),
    ):
        Image.new(mode, (30, 30)).save(directory / f"a_{mode.replace(';', '')}.{ending}")
    validation = images(root).validation
    assert all(validation[i][0].shape == (3, 16, 16) for i in range(len(validation)))
    assert len(validation) == 12


def test_augmentation_follows_from_the_default_generator_alone(root):
    gradient = Image.linear_gradient("L").convert("RGB")
    gradient.save(root / "train" / "n01_tench" / "a.png")
    source = images(root)
    torch.manual_seed(1)
    first, second = source.train[0][0], source.train[0][0]
    torch.manual_seed(1)
    assert torch.equal(source.train[0][0], first)
    assert not torch.equal(first, second)


def test_without_augmentation_training_images_are_read_like_validation_images(root):
    Image.linear_gradient("L").convert("RGB").save(root / "train" / "n01_tench" / "a.png")
    shutil.copy(root / "train" / "n01_tench" / "a.png", root / "val" / "n01_tench" / "a.png")
    source = images(root, augment=False)
    assert torch.equal(source.train[0][0], source.validation[0][0])


def test_the_validation_image_is_the_middle_of_the_image(root):
    picture = Image.new("RGB", (80, 40), (0, 0, 0))
    picture.paste((255, 255, 255), (20, 0, 60, 40))
    picture.save(root / "val" / "n01_tench" / "a.png")
    assert images(root, resize=40, image_size=40).validation[0][0].min() > 2


def test_the_splits_may_have_other_names(root):
    (root / "val").rename(root / "test")
    assert len(images(root, validation_split="test").validation) == 6


def test_missing_directories_are_named_together(tmp_path):
    with pytest.raises(DataError) as caught:
        images(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / "train") in str(caught.value)
    assert str(tmp_path / "nowhere" / "val") in str(caught.value)


def test_splits_that_differ_in_their_classes_are_refused_with_the_differences(root):
    (root / "train" / "n01_tench").rename(root / "train" / "n09_eel")
    with pytest.raises(
        DataError, match=r"(?s)train has 3; only there: n09_eel\n.*val has 3; only there: n01_tench"
    ):
        images(root)


def test_of_many_differing_classes_a_few_are_shown(root):
    for i in range(20):
        (root / "train" / f"extra_{i:02}").mkdir()
    with pytest.raises(DataError, match=r"only there: extra_00, .*extra_04 and 15 more"):
        images(root)


def test_classes_without_an_image_are_named(root):
    for path in (root / "train" / "n02_shark").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(DataError, match=r"imagefolder: .*n02_shark.*\.jpg"):
        images(root)


@pytest.mark.parametrize("kind", ["text", "empty", "truncated", "truncated png", "gone"])
def test_an_image_that_cannot_be_read_is_named_and_the_others_are_read(root, kind):
    path = root / "train" / "n01_tench" / "n01_tench_0.JPEG"
    whole = path.read_bytes()
    if kind == "truncated png":
        Image.effect_noise((60, 60), 50).save(path, format="PNG")
        path.write_bytes(path.read_bytes()[:-1500])
    else:
        path.write_bytes(
            {"text": b"hello", "empty": b"", "truncated": whole[:-40], "gone": whole}[kind]
        )
    source = images(root)
    if kind == "gone":
        path.unlink()
    with pytest.raises(
        DataError, match=r"n01_tench_0\.JPEG: not an image that can be read \(.*Replace the file"
    ):
        source.train[0]
    assert source.train[1][0].shape == (3, 16, 16)
