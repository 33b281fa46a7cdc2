"""SIGKILL at some points of a run, half of them within a save: the same command again ends
bit-equal.
"""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import CNN, EVERYTHING, GPT, HALF, WORKERS, assert_equal_to_the_bit, everything, tiny

from shoal.testing import world
from tests.harness import local

SCENES: dict[str, tuple[int, dict[str, Any]]] = {
    "augmented": (2, EVERYTHING),  # and mixup, moving average, clipping, label smoothing
    "dropout": (2, GPT),
    "workers": (2, {**GPT, **WORKERS}),
    "fp16": (2, HALF),
    "accumulated": (2, CNN),
    "one rank": (1, EVERYTHING),
    "three ranks": (3, GPT),
    "servers": (2, {**GPT, "strategy": "server=2,part_mb=0.001"}),
}
# From the seeds follow the rank and the call at which it is killed, once while training and once
# while saving.
SEEDS = {
    "augmented": (1, 2),
    "dropout": (3, 4),
    "workers": (5,),
    "fp16": (6,),
    "accumulated": (7,),
    "one rank": (8,),
    "three ranks": (9, 10),
    "servers": (11, 12),
}
POINTS = [
    (scene, part, seed)
    for scene in SCENES
    for part in ("training", "saving")
    for seed in SEEDS[scene]
]
EVERY_DAY = [("fp16", "training", 6)]
MARKED = [
    pytest.param(*point, marks=[] if point in EVERY_DAY else [pytest.mark.slow]) for point in POINTS
]

Undisturbed = Callable[[str], tuple[dict[str, Any], list[dict[str, int]]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What the undisturbed run of a scene leaves, and how many calls each of its ranks makes in
    each part.
    """
    known: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {}

    def of(scene: str) -> tuple[dict[str, Any], list[dict[str, int]]]:
        if scene not in known:
            ranks, settings = SCENES[scene]
            directory = tmp_path_factory.mktemp("undisturbed") / "run"
            calls = world.run(ranks, tiny_jobs.counts_calls, tiny(directory, settings))
            known[scene] = everything(directory), calls
        return known[scene]

    return of


def test_there_are_at_least_twenty_points() -> None:
    assert len(set(POINTS)) >= 20
    assert set(EVERY_DAY) < set(POINTS)


@pytest.mark.slow
def test_the_loss_scale_of_fp16_has_something_to_remember(undisturbed: Undisturbed) -> None:
    assert undisturbed("fp16")[0]["info"]["loss_scale"]["skipped"] > 0


@pytest.mark.parametrize(("scene", "part", "seed"), MARKED)
def test_a_killed_run_ends_bit_equal(
    undisturbed: Undisturbed, tmp_path: Path, scene: str, part: str, seed: int
) -> None:
    expected, calls = undisturbed(scene)
    ranks, settings = SCENES[scene]
    draw = random.Random(f"{part} {seed}")
    rank = draw.randrange(ranks)
    point = draw.randrange(1, calls[rank][part] * 9 // 10)
    job = tiny(tmp_path / "run", settings)
    if (
        scene == "servers"
    ):  # who waits for values hears nothing of another worker's end; the launcher ends it
        assert local.run(tiny_jobs.dies, (job, rank, part, point), ranks) == 128 + signal.SIGKILL
    else:
        with world.start(ranks, tiny_jobs.dies, job, rank, part, point) as dying:
            codes = dying.wait()
        assert codes[rank] == -signal.SIGKILL
        assert 0 not in codes
    world.run(ranks, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
