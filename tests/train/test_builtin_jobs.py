"""Every built-in experiment trains, on small files of the real formats where it needs files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_cifar
from PIL import Image

from shoal.config import builtin_names, read
from shoal.testing import world
from shoal.train import entry

SMALL = [
    ("train.epochs", "1"),
    ("train.max_steps", "2"),
    ("train.batch_size", "6"),
    ("data.workers", "0"),
]
FEW_BYTES = [
    ("data.sequence_length", "16"),
    ("model.options.width", "16"),
    ("evaluation.batch_size", "5000"),
]
SIZES: dict[str, list[tuple[str, str]]] = {
    "digits": [],
    "cifar10_resnet18": [],
    "imagenet_resnet18": [
        ("data.image_size", "32"),
        ("data.resize", "40"),
        ("evaluation.topk", "2"),
    ],
    "imagenet_resnet50": [
        ("data.image_size", "32"),
        ("data.resize", "40"),
        ("evaluation.topk", "2"),
    ],
    "stdlib_gpt": [*FEW_BYTES, ("model.options.heads", "2"), ("model.options.layers", "1")],
    "stdlib_lstm": FEW_BYTES,
}


def write_files(name: str, path: Path) -> None:
    draw = np.random.default_rng(0)
    if name.startswith("cifar10"):
        small_cifar.write("cifar10", path)
    if name.startswith("imagenet"):
        for split in ("train", "val"):
            for label in ("n01440764", "n01443537", "n01484850"):
                (path / split / label).mkdir(parents=True)
                for i in range(5):
                    pixels = draw.integers(0, 256, (48, 56, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(path / split / label / f"{label}_{i}.JPEG")


def train(name: str, path: Path, strategy: str, out: Path) -> list[dict[str, Any]]:
    flags = [
        *SMALL,
        *SIZES[name],
        ("data.path", str(path)),
        ("strategy", strategy),
        ("out", str(out)),
    ]
    with small_cifar.any_checksum():
        entry.train(read(name, flags).job)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_there_is_a_row_for_every_built_in_job() -> None:
    assert sorted(SIZES) == sorted(builtin_names())


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_built_in_job_trains_on_two_ranks(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_files(name, tmp_path / "data")
    world.run(2, train, name, tmp_path / "data", "ddp", tmp_path / "run")
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["kind"] for record in records] == ["train", "validation"]
    assert all(np.isfinite(record["loss"]) for record in records)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any((tmp_path / "run" / "tensorboard").iterdir())
