"""A data-loader worker that dies while a checkpoint is saved: a lost process, no failed save."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.checkpoint import AsyncSaver, Checkpoints
from shoal.checkpoint.rank_consensus import RankConsensus
from shoal.launch.failure import from_exception


@pytest.fixture
def worker() -> Iterator[int]:
    """The process of a data-loader worker."""
    # A worker that another process has forked is no child, of whose end torch would hear at once.
    loader = DataLoader(
        TensorDataset(torch.zeros(1000)), num_workers=1, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    pid = batches._workers[0].pid  # type: ignore[attr-defined]
    yield pid
    del batches


def lose(worker: int) -> str:
    """Kill the worker, and go on until torch raises its error."""
    os.kill(worker, signal.SIGKILL)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        time.sleep(0.01)
    raise AssertionError("torch does not say that the worker was lost")


class State(dict):
    """Tensors of a state; the worker dies while they are copied."""

    def __init__(self, worker: int) -> None:
        super().__init__(weight=torch.zeros(3))
        self.worker = worker

    def items(self):  # type: ignore[override]
        lose(self.worker)


def test_a_worker_lost_in_an_action_of_a_save_ends_the_rank(worker: int) -> None:
    with pytest.raises(RuntimeError, match="is killed by signal") as caught:
        RankConsensus().on_every_rank("step 7 was not saved", lambda: lose(worker))
    assert from_exception(0, caught.value).is_loss


def test_a_worker_lost_in_the_copy_of_a_save_ends_the_rank(worker: int, tmp_path: Path) -> None:
    saver = AsyncSaver(Checkpoints(tmp_path))
    with pytest.raises(RuntimeError, match="is killed by signal") as caught:
        saver.start(7, {}, {}, State(worker), best=False)
    assert from_exception(0, caught.value).is_loss
    assert saver.close() is None
