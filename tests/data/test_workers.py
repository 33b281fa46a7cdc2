"""Processes that fetch samples end when training does."""

import os
import subprocess
import sys
from multiprocessing import active_children, util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.mesh import shutdown
from shoal.run.supervised import supervised
from shoal.testing import world


class _Note:
    """Has a worker leave a file when it ends as it was told to, which one that is terminated
    does not.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, _worker: int) -> None:
        util.Finalize(None, (self.directory / str(os.getpid())).touch, exitpriority=0)


def ends_with_workers_at_hand(directory: Path) -> int:
    run = shoal.init(strategy="ddp")
    rows = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    note = _Note(directory)
    loader = DataLoader(rows, 4, num_workers=2, persistent_workers=True, worker_init_fn=note)
    model = nn.Linear(3, 1)
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for x, y in loader:
        run.forward_backward(supervised(nn.functional.mse_loss, model), x, y)
        optimizer.step()
    run.in_a_cycle = run  # as whatever holds a trainer that holds it
    del run, model, optimizer, loader
    shutdown()
    return len(active_children())


def test_workers_are_told_to_end(tmp_path: Path) -> None:
    assert world.run(2, ends_with_workers_at_hand, tmp_path) == [0, 0]
    assert len(list(tmp_path.iterdir())) == 4


SCRIPT = """
import atexit
import multiprocessing.util
atexit.register(lambda: print("left:", len(multiprocessing.active_children())))

import shoal
import torch
from torch.utils.data import DataLoader

run = shoal.init()
model = torch.nn.Linear(1, 1)
loader = DataLoader(torch.ones(8, 1), 2, num_workers=2, persistent_workers={persistent})
model, loader = run.prepare(model, loader)
if {leaves_early}:
    batches = iter(loader)
    next(batches)
else:
    list(loader)
print("begun:", len(multiprocessing.active_children()))
"""


@pytest.mark.parametrize(("persistent", "leaves_early"), [(True, False), (False, True)])
def test_one_process_ends_its_workers_before_multiprocessing_waits_for_them(
    persistent: bool, leaves_early: bool
) -> None:
    script = SCRIPT.format(persistent=persistent, leaves_early=leaves_early)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-2:] == ["begun: 2", "left: 0"], ended.stderr
