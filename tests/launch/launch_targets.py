"""Targets of the ranks in test_local_launch.py."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

from shoal.errors import DataError, StrategyRefused
from shoal.launch import environment
from shoal.launch.rank import EXIT_RESTART


def rank() -> int:
    return int(os.environ["RANK"])


def note(folder: str, name: str, text: str = "") -> None:
    """Write a file that appears only when it is complete."""
    partial = Path(folder, f".{name}.{rank()}")
    partial.write_text(text)
    partial.rename(Path(folder, f"{name}.{rank()}"))


def initialize_group() -> None:
    dist.init_process_group("gloo")
    dist.barrier()


def writes_its_rank(folder: str) -> None:
    initialize_group()
    info = environment.read(os.environ)
    note(
        folder,
        "place",
        f"{info.launcher} {info.rank}/{info.world} {info.local_rank}/{info.local_world}",
    )
    note(folder, "port", os.environ["MASTER_PORT"])


def writes_its_threads(folder: str) -> None:
    server = Path(f"/proc/{os.getppid()}/status").read_text()
    note(folder, "threads", f"{torch.get_num_threads()} {server.split('Threads:')[1].split()[0]}")


def writes_its_name(folder: str) -> None:
    note(folder, "name", Path("/proc/self/comm").read_text().strip())


def fails_in_rank_one(folder: str) -> None:
    note(folder, "pid", str(os.getpid()))
    initialize_group()
    if rank() == 1:
        raise ValueError("first line\nsecond line")
    dist.barrier()


def fails_in_rank_one_while_others_sleep(folder: str) -> None:
    note(folder, "pid", str(os.getpid()))
    initialize_group()
    if rank() == 1:
        raise ValueError("nothing to lose")
    time.sleep(1000)


def dies_in_rank_one(folder: str) -> None:
    initialize_group()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def lacks_data(folder: str) -> None:
    if rank() == 1:
        raise DataError("data/x is not there; put it there")
    time.sleep(1000)


def refuses_the_model(folder: str) -> None:
    if rank() == 1:
        raise StrategyRefused("tensor: nothing of the model can be divided. Use ddp.")
    time.sleep(1000)


def exits(folder: str, codes: list[int]) -> None:
    initialize_group()
    sys.exit(codes[rank()])


def saves_when_told(folder: str, parent: int) -> None:
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    initialize_group()
    if rank() == 0:
        os.kill(parent, signal.SIGTERM)
    while not signals:
        time.sleep(0.01)
    note(folder, "saved")
    sys.exit(EXIT_RESTART)


def signals_its_parent(folder: str, parent: int, number: int) -> None:
    atexit.register(note, folder, "exit")
    try:
        initialize_group()
        if rank() == 0:
            os.kill(parent, number)
        # Python's handler only sets a flag. Between its last look at the flag and the system call
        # of a long sleep, a signal would be seen at the end of that sleep.
        while True:
            time.sleep(0.01)
    finally:
        note(folder, "finally")


def ignores_the_end(folder: str, parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder, "pid", str(os.getpid()))
    initialize_group()
    if rank() == 0:
        os.kill(parent, signal.SIGTERM)
    time.sleep(1000)


def prints(folder: str) -> None:
    print(f"stdout of {rank()}")
    print(f"stderr of {rank()}", file=sys.stderr)
