"""A SIGTERM to a rank and its loader workers together, as Slurm sends it to a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import signal, sys, time
import torch, shoal
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Rows(Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, index): return torch.ones(2)

class Stream(IterableDataset):
    def __iter__(self): return (torch.ones(2) for _ in range(10_000))

run = shoal.init("single", announce=lambda line: None)
signal.signal(signal.SIGTERM, lambda *_: run.request_stop())
model = torch.nn.Linear(2, 1)
source = Stream() if sys.argv[1] == "stream" else Rows()
loader = DataLoader(source, batch_size=2, num_workers=2)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for x in loader:
    run.forward_backward(lambda x: model(x).mean(), x)
    optimizer.step()
    if run.stopping():
        time.sleep(1)  # a save
        print("saved", flush=True)
        sys.exit(75)
    print("step", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["rows", "stream"])
def test_a_rank_saves_although_its_workers_get_the_same_sigterm(
    tmp_path: Path, source: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "step\n"
            os.killpg(running.pid, signal.SIGTERM)
            said, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 75, errors
    assert said.endswith("saved\n")
