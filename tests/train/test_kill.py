"""SIGKILL at twenty points of a run, half of them within a save: the same command again ends bit-equal."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import CNN, EVERYTHING, GPT, HALF, MLP, WORKERS, assert_equal_to_the_bit, everything, tiny

from shoal.testing import world

SCENES: dict[str, tuple[int, dict[str, Any]]] = {
    "augmentation, mixup, moving average, warm start": (2, EVERYTHING),
    "dropout": (2, GPT),
    "dropout, data-loader workers": (2, {**GPT, **WORKERS}),
    "fp16 whose loss scale falls": (2, HALF),
    "accumulation, incomplete batches left out": (2, CNN),
    "one rank": (1, EVERYTHING),
    "three ranks": (3, GPT),
}
# A scene, the part of the run, and the seed from which rank and point are drawn.
POINTS = [
    *[("augmentation, mixup, moving average, warm start", part, seed) for part in ("training", "saving") for seed in (1, 2)],
    *[("dropout", part, seed) for part in ("training", "saving") for seed in (3, 4)],
    *[("dropout, data-loader workers", part, 5) for part in ("training", "saving")],
    *[("fp16 whose loss scale falls", part, 6) for part in ("training", "saving")],
    *[("accumulation, incomplete batches left out", part, 7) for part in ("training", "saving")],
    *[("one rank", part, 8) for part in ("training", "saving")],
    *[("three ranks", part, seed) for part in ("training", "saving") for seed in (9, 10)],
]  # fmt: skip

Undisturbed = Callable[[str], tuple[dict[str, Any], list[dict[str, int]]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What the undisturbed run of a scene leaves, and how many calls each of its ranks makes in each part."""
    known: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {}

    def of(scene: str) -> tuple[dict[str, Any], list[dict[str, int]]]:
        if scene not in known:
            ranks, settings = SCENES[scene]
            directory = tmp_path_factory.mktemp("undisturbed") / "run"
            calls = world.run(ranks, tiny_jobs.counts_calls, tiny(directory, settings))
            known[scene] = everything(directory), calls
        return known[scene]

    return of


def test_there_are_twenty_points_and_half_are_within_saves() -> None:
    assert [part for _, part, _ in POINTS].count("saving") == 10
    assert len(set(POINTS)) == 20


@pytest.mark.parametrize(("scene", "part", "seed"), POINTS)
def test_a_killed_run_ends_bit_equal(
    undisturbed: Undisturbed, tmp_path: Path, scene: str, part: str, seed: int
) -> None:
    expected, calls = undisturbed(scene)
    ranks, settings = SCENES[scene]
    draw = random.Random(f"{part} {seed}")
    rank = draw.randrange(ranks)
    point = draw.randrange(1, calls[rank][part] * 9 // 10)
    job = tiny(tmp_path / "run", settings)
    with world.start(ranks, tiny_jobs.dies, job, rank, part, point) as dying:
        codes = dying.wait()
    assert codes[rank] == -signal.SIGKILL
    assert 0 not in codes
    world.run(ranks, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
