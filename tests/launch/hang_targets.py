"""Targets of the ranks in test_hangs.py: a run in which rank 1 does not come, once."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoal

FAULT_STEP = 5
STEPS = 12


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples, of which one comes never while `blocks` is set."""

    blocks = False

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.blocks:
            time.sleep(1000)
        return torch.full((4,), float(index)), torch.ones(1)


def hangs(folder: str, how: str, fault: str, strategy: str = "ddp") -> None:
    """Train some steps. In the first start, rank 1 does not come to step FAULT_STEP."""
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    data = Numbers()
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
    is_late = how == "first" and run.rank == 1

    def compute_loss(inputs: Tensor, target: Tensor) -> Tensor:
        if is_late and step == FAULT_STEP:
            in_step(fault)
        return (model(inputs) - target).square().mean()

    for step, (inputs, target) in enumerate(batches(loader)):
        if fault == "slow" and run.rank == 1:
            time.sleep(0.02)
        optimizer.zero_grad()
        run.forward_backward(compute_loss, inputs, target)
        if is_late and fault == "skip" and step == FAULT_STEP:
            time.sleep(1000)  # where the others make a collective of their own
        if fault == "skip" and step == FAULT_STEP and how == "first":
            torch.distributed.barrier()
        optimizer.step()
        if is_late and fault == "data" and step == FAULT_STEP:
            Numbers.blocks = True
    Path(folder, f"ended.{run.rank}").write_text(how)


def batches(loader: Any) -> Iterator[Any]:
    yield from loader


def in_step(fault: str) -> None:
    if fault == "sleep":
        time.sleep(1000)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "gil":
        ctypes.PyDLL(None).sleep(1000)  # in C, with the interpreter locked


def spins_off_steps(folder: str, how: str) -> None:
    """Train enough steps for rank 1 to be seen as slow."""
    global STEPS
    STEPS = 120
    hangs(folder, how, "slow")


def loses_its_spawner(folder: str, how: str) -> None:
    """Lose the process from which helpers are forked, and wait for ever."""
    from shoal.launch.helper_spawner import HelperSpawner

    if how == "first" and os.environ["RANK"] == "0":
        spawner = HelperSpawner()
        os.kill(spawner._pid, signal.SIGKILL)
        time.sleep(1000)


def loses_the_fork_server(folder: str, how: str) -> None:
    """Kill the fork server from rank 0, once rank 1 has been forked too."""
    if how == "first":
        rank_1 = Path(folder, "rank 1 is there")
        if os.environ["RANK"] == "0":
            # It sleeps when it has told the launcher of rank 1, for the next request.
            server = Path(f"/proc/{os.getppid()}/stat")
            while not rank_1.exists() or server.read_text().rpartition(")")[2].split()[0] != "S":
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGKILL)
        rank_1.touch()
        time.sleep(1000)
