"""`optimizer.in_backward` in a job: the run without it, and resumed to the bit."""

from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
import torch
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, metrics, tiny

from shoal.checkpoint import Checkpoints
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world

EARLY: dict[str, Any] = {
    **MLP,
    "train.precision": "fp64",
    "train.ema": 0.9,
    "optimizer.name": "AdamW",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.1,
    "optimizer.decay_norm_and_bias": False,
    "optimizer.in_backward": True,
    "schedule.warmup_epochs": 1,
}


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    saved = Checkpoints(directory / "checkpoints").load(pytest.fail)
    assert saved is not None
    return {name: value for name, value in saved.tensors.items() if value.is_floating_point()}


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("ddp", 1, marks=pytest.mark.slow),
        pytest.param("zero1", 2, marks=pytest.mark.slow),
        ("zero3", 2),
    ],
)
def test_the_run_is_that_of_an_ordinary_step(tmp_path: Path, strategy: str, ranks: int) -> None:
    tiny_jobs.trains(tiny(tmp_path / "ordinary", EARLY, optimizer__in_backward=False))
    world.run(ranks, tiny_jobs.trains, tiny(tmp_path / "early", EARLY, strategy=strategy))
    losses, expected = (
        [r["loss"] for r in metrics(tmp_path / name)] for name in ("early", "ordinary")
    )
    assert losses == pytest.approx(expected, rel=1e-10)
    state, reference = weights_of(tmp_path / "early"), weights_of(tmp_path / "ordinary")
    assert state.keys() == reference.keys()
    for name, value in state.items():
        assert (value - reference[name]).abs().max() <= 1e-10 * reference[name].abs().max(), name


@pytest.mark.slow
def test_stopped_in_the_middle_of_an_epoch_it_ends_bit_equal(tmp_path: Path) -> None:
    settings = {**EARLY, "strategy": "zero3"}
    world.run(2, tiny_jobs.trains, tiny(tmp_path / "undisturbed", settings))
    job = tiny(tmp_path / "run", settings)
    with world.start(2, tiny_jobs.is_signalled, job, 5) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 2
    world.run(2, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))
