"""The same command again: bit for bit the run that was never stopped; on other numbers of
ranks, the same losses.
"""

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
import torch
from tiny_jobs import (
    EVERYTHING,
    GPT,
    MLP,
    WORKERS,
    assert_equal_to_the_bit,
    differing,
    everything,
    metrics,
    tiny,
)

from shoal.checkpoint import Checkpoints, newest
from shoal.errors import ConfigError
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world

DOUBLE_PRECISION = {"train.precision": "fp64"}
DOUBLE = {**MLP, **DOUBLE_PRECISION}


def stop(ranks: int, *arguments: Any) -> None:
    """A world whose ranks get a SIGTERM after a step: the next one is their last."""
    with world.start(ranks, tiny_jobs.is_signalled, *arguments) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_stopped_in_the_middle_of_an_epoch_it_ends_bit_equal(tmp_path: Path, ranks: int) -> None:
    world.run(ranks, tiny_jobs.trains, tiny(tmp_path / "undisturbed", GPT))
    job = tiny(tmp_path / "run", GPT)
    stop(ranks, job, 5)
    assert newest(tmp_path / "run/checkpoints") == tmp_path / "run/checkpoints/step-00000006"
    world.run(ranks, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_stopped_after_every_third_step_it_ends_bit_equal(tmp_path: Path) -> None:
    tiny_jobs.trains(tiny(tmp_path / "undisturbed", EVERYTHING))
    job = tiny(tmp_path / "run", EVERYTHING)
    for step in (2, 5, 8):
        with pytest.raises(SystemExit, match=str(EXIT_RESTART)):
            tiny_jobs.is_signalled(job, step)
    tiny_jobs.trains(job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))


@pytest.mark.parametrize(
    # A state of its own, a product in it, a copy of the gradient.
    "name",
    ["Adafactor", *(pytest.param(name, marks=pytest.mark.slow) for name in ("NAdam", "Rprop"))],
)
def test_the_state_of_every_optimizer_is_resumed(tmp_path: Path, name: str) -> None:
    settings = {**MLP, "optimizer.name": name, "optimizer.lr": 0.01, "train.epochs": 2}
    tiny_jobs.trains(tiny(tmp_path / "undisturbed", settings))
    job = tiny(tmp_path / "run", settings)
    with pytest.raises(SystemExit, match=str(EXIT_RESTART)):
        tiny_jobs.is_signalled(job, 5)
    tiny_jobs.trains(job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_data_loader_workers_change_nothing(tmp_path: Path) -> None:
    world.run(2, tiny_jobs.trains, tiny(tmp_path / "without", GPT))
    world.run(2, tiny_jobs.trains, tiny(tmp_path / "with", GPT, WORKERS))
    assert_equal_to_the_bit(everything(tmp_path / "with"), everything(tmp_path / "without"))


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed run on one rank in float64."""
    directory = tmp_path_factory.mktemp("one") / "run"
    tiny_jobs.trains(tiny(directory, DOUBLE))
    return directory


LAYOUTS = [
    ("zero3", 4),
    ("server=2,part_mb=0.0001", 2),
    ("ddp", 3),
    ("zero3,hybrid=2", 4),
    ("server=3", 1),
    ("zero2,offload=true", 3),
]


@pytest.mark.parametrize(
    "layouts", [LAYOUTS[:3], pytest.param(LAYOUTS, marks=pytest.mark.slow)], ids=["three", "six"]
)
def test_a_run_goes_on_under_any_strategy_on_any_number_of_ranks(
    tmp_path: Path, on_one_rank: Path, layouts: list[tuple[str, int]]
) -> None:
    for leg, (strategy, ranks) in enumerate(layouts):
        stop_at = 12 // len(layouts) * (leg + 1)
        with world.start(
            ranks,
            tiny_jobs.is_signalled,
            tiny(tmp_path / "run", DOUBLE, strategy=strategy, data__path=str(tmp_path / "seen")),
            stop_at - 1,
        ) as running:
            expected = EXIT_RESTART if stop_at < 12 else 0
            assert running.wait() == [expected] * ranks, (strategy, ranks)
    # Each of the three epochs has seen every sample once, though each was shared out in two or
    # three ways.
    seen = (tmp_path / "seen").read_text().split()
    everyone = Counter({str(sample): 1 for sample in range(30)})
    assert [Counter(seen[start : start + 30]) for start in (0, 30, 60)] == [everyone] * 3
    assert_close(metrics(tmp_path / "run"), metrics(on_one_rank))
    weights, expected_weights = (
        weights_of(directory) for directory in (tmp_path / "run", on_one_rank)
    )
    for name, weight in weights.items():
        assert (weight - expected_weights[name]).abs().max() <= 1e-10 * expected_weights[
            name
        ].abs().max()


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("zero1", 2), pytest.param("zero3", 4, marks=pytest.mark.slow)]
)
def test_what_is_loaded_in_shards_is_what_was_saved_bit_for_bit(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    saved = tiny(tmp_path / "run", GPT, DOUBLE_PRECISION, strategy="zero3")
    stop(3, saved, 5)
    whole = Checkpoints(tmp_path / "run/checkpoints").load(pytest.fail)
    assert whole is not None
    job = tiny(tmp_path / "run", GPT, DOUBLE_PRECISION, strategy=strategy)
    for found in world.run(ranks, tiny_jobs.is_resumed, job):
        assert differing(found, whole.tensors) == []


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Losses to 1e-10; everything else, counts among it, exactly."""
    assert [record.pop("loss") for record in found] == pytest.approx(
        [record.pop("loss") for record in expected], rel=1e-10
    )
    assert found == expected


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    saved = Checkpoints(directory / "checkpoints").load(pytest.fail)
    assert saved is not None
    return {name: value for name, value in saved.tensors.items() if name.startswith("model.")}


def test_a_checkpoint_that_is_due_when_an_epoch_ends_is_saved(tmp_path: Path) -> None:
    job = tiny(
        tmp_path / "run",
        MLP,
        checkpoint__every_epochs=100,
        checkpoint__every_steps=4,
        checkpoint__keep=9,
    )
    tiny_jobs.trains(job)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert names == ["step-00000004", "step-00000008", "step-00000012"]


@pytest.mark.slow
@pytest.mark.parametrize(("hint", "step"), [("best", 4), ("latest", 12)])
def test_what_a_killed_save_left_undone_is_done_by_the_resume(
    tmp_path: Path, hint: str, step: int
) -> None:
    tiny_jobs.trains(tiny(tmp_path / "undisturbed", GPT))
    job = tiny(tmp_path / "run", GPT)
    with world.start(1, tiny_jobs.dies_before, job, hint, step) as dying:
        assert dying.wait() == [-signal.SIGKILL]
    hints = tmp_path / "run/checkpoints"
    assert not (hints / hint).exists() or str(step) not in (hints / hint).read_text()
    tiny_jobs.trains(job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))


def test_what_is_there_is_never_started_afresh(tmp_path: Path) -> None:
    tiny_jobs.trains(tiny(tmp_path / "run", MLP))
    before = tiny_jobs.contents(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.resume: is false, but .*run holds checkpoints"
    ):
        tiny_jobs.trains(tiny(tmp_path / "run", MLP, checkpoint__resume=False))
    assert tiny_jobs.contents(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run")
    tiny_jobs.trains(tiny(tmp_path / "run", MLP, checkpoint__resume=False))
