"""A job of which a rank's memory loses a bit: the others tell it, and the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import MLP, Undrawn, go, tiny

from shoal.config.job import Job
from shoal.errors import LaunchError
from shoal.testing import world


class LosesABit(Undrawn):
    """Has another bit in a weight of rank 1 after step 3: before the step at which scripts of users
    compare their weights, and after the last comparison of the job.
    """

    def _step(self, batch: Any, epochs: float) -> None:
        super()._step(batch, epochs)
        if self.step == 3 and self.run.rank == 1:
            weight = next(self.model.parameters()).detach().view(-1)
            weight.view(torch.int32)[0] ^= 1 << 20


def loses_a_bit(job: Job) -> int:
    training = LosesABit(job)
    go(training)
    return training.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "ranks 0 and 1 should hold the same bits"),
        (3, "rank 1 holds other bits than 2 other ranks"),
    ],
)
def test_a_flipped_bit_ends_the_run_at_the_next_comparison(
    tmp_path: Path, ranks: int, words: str
) -> None:
    job = tiny(tmp_path, MLP, checkpoint__every_steps=50, train__check_replicas=6)
    with pytest.raises(LaunchError, match=words):
        world.run(ranks, loses_a_bit, job)
