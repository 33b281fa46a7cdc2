"""Checkpoints move between layouts with a tensor axis and all others; with them clipping,
averages, evaluation.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
import torch
from tiny_jobs import CNN, GPT, assert_equal_to_the_bit, everything, metrics, tiny

from shoal.checkpoint import Checkpoints
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world

LAYOUTS = [
    ("tensor=2,zero3", 4),
    ("tensor=2,pipeline=2,zero1", 8),
    ("ddp", 1),
    ("tensor=2", 2),
    ("tensor=2,ddp", 4),
    ("tensor=2,zero1", 4),
]
IN_SEQUENCE = [
    ("tensor=2,sequence=true,zero3", 4),
    ("tensor=2,sequence=true,pipeline=2,zero1", 8),
    *LAYOUTS[2:],
]
WORDS = {
    **GPT,
    "model.options.dropout": 0.0,
    "optimizer.name": "SGD",
    "train.clip_norm": 0.5,
    "train.precision": "fp64",
    "train.label_smoothing": 0.1,
}
IMAGES = {
    **CNN,
    "data.name": "recorded",
    "train.clip_norm": 0.5,
    "train.ema": 0.9,
    "train.precision": "fp64",
}


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        pytest.param(WORDS, IN_SEQUENCE, marks=pytest.mark.slow),
        pytest.param(IMAGES, LAYOUTS, marks=pytest.mark.slow),
    ],
    ids=["gpt", "cnn"],
)
def test_a_run_goes_on_cut_in_any_way(
    tmp_path: Path, settings: dict[str, Any], layouts: list[tuple[str, int]]
) -> None:
    tiny_jobs.trains(tiny(tmp_path / "one", settings))
    steps = metrics(tmp_path / "one")[-1]["step"]
    for leg, (strategy, ranks) in enumerate(layouts):
        stop_at = 2 * (leg + 1) if leg + 1 < len(layouts) else 99
        job = tiny(tmp_path / "run", settings, strategy=strategy)
        with world.start(ranks, tiny_jobs.is_signalled, job, stop_at - 1) as running:
            expected = EXIT_RESTART if stop_at < steps else 0
            assert running.wait() == [expected] * ranks, (strategy, ranks)
            if expected == 0:
                break
    found, undisturbed = metrics(tmp_path / "run"), metrics(tmp_path / "one")
    rounded = [
        [
            {k: pytest.approx(v, rel=1e-9) if isinstance(v, float) else v for k, v in r.items()}
            for r in undisturbed
        ]
    ]
    assert [found] == rounded
    expected_weights = saved(tmp_path / "one")
    for name, value in saved(tmp_path / "run").items():
        assert (value - expected_weights[name]).abs().max() <= 1e-9 * expected_weights[
            name
        ].abs().max().clamp(min=1e-9), name


def saved(directory: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(directory / "checkpoints").load(pytest.fail)
    assert found is not None
    return {
        name: value
        for name, value in found.tensors.items()
        if value.is_floating_point() and value.numel()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("tensor=2", 2), ("tensor=2,pipeline=2,cuts=blocks.0", 4)]
)
def test_a_run_that_was_stopped_by_one_rank_of_a_group_ends_bit_equal(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    settings = {**GPT, "strategy": strategy}  # with dropout and an average
    world.run(ranks, tiny_jobs.trains, tiny(tmp_path / "undisturbed", settings))
    job = tiny(tmp_path / "run", settings)
    with world.start(ranks, tiny_jobs.is_signalled, job, 5, 15, 1) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * ranks
    world.run(ranks, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))
