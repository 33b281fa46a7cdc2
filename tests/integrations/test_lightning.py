"""`ShoalStrategy`: the numbers of Lightning's own Trainer on one process, under each strategy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.platform.optional_packages import is_installed
from shoal.testing import world

pytestmark = pytest.mark.skipif(
    not is_installed("lightning"), reason="pip install 'shoal[lightning]'"
)
TOLERANCE = 1e-10
CHECKPOINTS_OFF = {"enable_checkpointing": False}
SETTINGS = {
    "plain": CHECKPOINTS_OFF,
    "clipped": CHECKPOINTS_OFF | {"gradient_clip_val": 0.3},
    "accumulated": CHECKPOINTS_OFF | {"accumulate_grad_batches": 2},
}


def train(*arguments: Any, **options: Any) -> list[float]:
    import lightning_job  # imports Lightning, with warnings that are errors in a test

    return lightning_job.train(*arguments, **options)


def refusal(*arguments: Any) -> str:
    import lightning_job

    return lightning_job.refusal(*arguments)


@cache
def expected(settings: str, module: str = "LitAutoEncoder") -> list[float]:
    (found,) = world.run(1, train, "", Path("unused"), SETTINGS[settings], module)
    return found


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", "accumulated"),
        ("zero3", "clipped"),
        ("tensor=2", "plain"),
        ("pipeline=2", "clipped"),
        ("pipeline=2", "accumulated"),
        ("server=1", "clipped"),
    ],
)
def test_a_job_of_lightning_logs_the_losses_of_one_process(strategy: str, settings: str) -> None:
    for found in world.run(2, train, strategy, Path("unused"), SETTINGS[settings]):
        assert found == pytest.approx(expected(settings), rel=TOLERANCE)


def test_shares_of_different_sizes_count_by_their_samples() -> None:
    for found in world.run(3, train, "ddp", Path("unused"), CHECKPOINTS_OFF):
        assert found == pytest.approx(expected("plain"), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("ddp", "plain"), ("ddp", "accumulated"), ("zero3", "plain"), ("pipeline=2", "accumulated")],
)
def test_a_counted_loss_is_divided_by_the_counts_of_all_ranks(strategy: str, settings: str) -> None:
    wanted = expected(settings, "MeanOfTokens")
    arguments = (strategy, Path("unused"), SETTINGS[settings], "CountedTokens")
    for found in world.run(2, train, *arguments):
        assert found == pytest.approx(wanted, rel=TOLERANCE)


def test_optimizers_may_be_stepped_by_hand() -> None:
    wanted = expected("plain", "TwoOptimizers")
    for found in world.run(2, train, "zero3", Path("unused"), CHECKPOINTS_OFF, "TwoOptimizers"):
        assert found == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("strategy", ["zero3", "pipeline=2", "server=1"])
def test_a_trained_model_is_tested_predicted_and_loaded_from_its_checkpoint(
    strategy: str, tmp_path: Path
) -> None:
    arguments = ({"max_epochs": 1}, "LitAutoEncoder", None, False, True)
    (wanted,) = world.run(1, train, "", tmp_path / "one", *arguments)
    for found in world.run(2, train, strategy, tmp_path / "two", *arguments):
        assert found == pytest.approx(wanted, rel=1e-8, abs=1e-10)


def test_a_checkpoint_resumes_within_an_epoch_under_another_strategy(tmp_path: Path) -> None:
    name = "LitAutoEncoder"
    settings = {"callbacks": ["every 4 steps"]}
    (whole,) = world.run(1, train, "single", tmp_path / "one", settings, name, None, True)
    world.run(2, train, "zero3", tmp_path / "two", settings | {"max_steps": 9}, name, None, True)
    saved = next((tmp_path / "two").rglob("*step=8.ckpt"))
    for found in world.run(3, train, "ddp", tmp_path / "three", settings, name, saved, True):
        assert found[-9:] == pytest.approx(whole[-9:], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "settings", "module", "said"),
    [
        ("ddp", {"precision": "bf16-mixed"}, "LitAutoEncoder", 'ShoalStrategy(..., precision="bf1'),
        ("ddp", {"sync_batchnorm": True}, "LitAutoEncoder", "ShoalStrategy(..., sync_batchnorm=T"),
        ("ddp", {}, "OwnBackward", "OwnBackward.backward: gradients are computed by run.backward"),
        ("pipeline=2", {}, "TwoOptimizers", "the loss must be a function"),
        ("ddp", {"batch_size": 2}, "SumOfSamples", "a sum over samples (sum)"),
        ("zero3", {}, "SumOfSamples", "a sum over samples (sum)"),
        ("ddp", {}, "MixedSamples", "samples influence one another"),
    ],
)
def test_what_the_strategy_would_not_heed_is_refused(
    strategy: str, settings: dict[str, Any], module: str, said: str
) -> None:
    arguments = (strategy, Path("unused"), CHECKPOINTS_OFF | settings, module)
    for error in world.run(2, refusal, *arguments):
        assert said in error


def test_a_checkpoint_of_another_strategy_has_no_state_to_resume_from(tmp_path: Path) -> None:
    settings = {"max_epochs": 1}
    world.run(1, train, "", tmp_path, settings)
    saved = next(tmp_path.rglob("*.ckpt"))
    (error,) = world.run(1, refusal, "ddp", tmp_path / "again", {}, "LitAutoEncoder", saved)
    assert "CheckpointError" in error
    assert "Its weights can be loaded by load_from_checkpoint" in error


def test_a_value_that_only_pickle_could_send_is_refused() -> None:
    from lightning_job import ShoalStrategy

    mesh = SimpleNamespace(all_gather_str=lambda text: [text, ""])
    strategy: Any = SimpleNamespace(world_size=2, global_rank=0, run=SimpleNamespace(mesh=mesh))
    assert ShoalStrategy.broadcast(strategy, {"path": Path("a/b")}) == {"path": "a/b"}
    with pytest.raises(UsageError, match="broadcast of a object"):
        ShoalStrategy.broadcast(strategy, object())
