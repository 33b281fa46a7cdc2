"""`train.draws`: which random numbers a job draws in its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_jobs
from tiny_jobs import GPT, tiny

from shoal.testing import world

DRAWS = {**GPT, "train.precision": "fp64", "train.max_steps": 5, "log.every": 1, "train.ema": 0.0}


def losses(out: Path, ranks: int, draws: str) -> list[float]:
    world.run(ranks, tiny_jobs.trains, tiny(out, DRAWS, {"train.draws": draws}))
    return [line["loss"] for line in tiny_jobs.metrics(out) if "lr" in line]


@pytest.mark.slow
def test_global_draws_give_the_dropout_of_one_device(tmp_path: Path) -> None:
    single = losses(tmp_path / "single", 1, "global")
    assert losses(tmp_path / "global", 2, "global") == pytest.approx(single, rel=1e-10)
    assert losses(tmp_path / "rank", 2, "rank") != pytest.approx(single, rel=1e-3)
