"""A resumed run whose data set has changed is refused with both facts, or goes on by name."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_jobs import MLP, is_signalled, metrics, tiny, trains

from shoal.errors import LaunchError
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world

SOURCE = """
import torch
from torch.utils.data import TensorDataset
from shoal.data.source import Source

def load(config, seed):
    images = torch.rand({count}, 1, 2, 2, generator=torch.Generator().manual_seed(3))
    images = images.flip(0) if {flips} else images
    samples = TensorDataset(images, torch.arange({count}) % 6)
    return Source(samples, samples, "classification", 6, (1, 2, 2))

data = {{"mine": load}}
"""


def test_changed_data_is_refused_with_both_facts_and_accepted_by_name(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    settings = {**MLP, "plugin": str(source), "data.name": "mine", "data.samples": 1000}
    source.write_text(SOURCE.format(count=30, flips=False))
    job = tiny(tmp_path / "run", settings)
    with world.start(2, is_signalled, job, 5, signal.SIGTERM) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 2
    source.write_text(SOURCE.format(count=27, flips=False))
    with pytest.raises(LaunchError, match="shrunk: 30 samples when it was saved, 27 here"):
        world.run(1, trains, job)
    source.write_text(SOURCE.format(count=30, flips=True))
    with pytest.raises(LaunchError, match=r"another order .*accept_data changed"):
        world.run(1, trains, job)
    accepted = tiny(tmp_path / "run", settings, train__accept_data="changed")
    assert world.run(1, trains, accepted) == [12]
    assert world.run(1, trains, job) == [12]  # its checkpoints know the new data
    assert metrics(tmp_path / "run")[-1]["step"] == 12
