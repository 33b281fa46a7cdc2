"""Targets of the ranks in test_restarting.py. Their checkpoints are files, `saved.STEP`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from shoal.errors import ServerLost
from shoal.launch.rank import EXIT_RESTART


def rank() -> int:
    return int(os.environ["RANK"])


def record_start(folder: str, how: str) -> int:
    """Record this start in a file, and return its number, from 1."""
    starts = len(list(Path(folder).glob(f"start.*.{rank()}"))) + 1
    world, temporary = os.environ["WORLD_SIZE"], Path(folder, f".start.{rank()}")
    temporary.write_text(f"{how} of {world}")
    temporary.rename(Path(folder, f"start.{starts}.{rank()}"))
    return starts


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def dies(folder: str, how: str, number: int, times: int, saves: bool) -> None:
    """Kill rank 1 in its first `times` starts, after a new checkpoint if `saves`."""
    start = record_start(folder, how)
    if rank() == 1 and start <= times:
        until(Path(folder, f"start.{start}.0"))
        if saves:
            Path(folder, f"saved.{start}").touch()
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored from the start
        os.kill(os.getpid(), number)
    if rank() == 0 and start <= times:
        time.sleep(1000)


def dies_once_and_sleeps(folder: str, how: str) -> None:
    dies(folder, how, signal.SIGKILL, 1, True)
    time.sleep(1000)


def is_wrong(folder: str, how: str) -> None:
    record_start(folder, how)
    raise ValueError("always wrong")


def loses_a_shard(folder: str, how: str) -> None:
    if record_start(folder, how) == 1:
        raise ServerLost(
            "shard 0 of the parameter servers is lost: it is gone. The same command goes on."
        )


def stops_when_told(folder: str, how: str) -> None:
    """Save and stop at a SIGTERM, as a run does; end without one once the file `end` exists."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    start = record_start(folder, how)
    while not signals:
        if Path(folder, "end").exists():
            return
        time.sleep(0.01)
    Path(folder, f"saved.{start}").touch()
    sys.exit(EXIT_RESTART)


def saves_slowly(folder: str, how: str) -> None:
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    record_start(folder, how)
    while not signals:
        time.sleep(0.01)
    Path(folder, f"told.{rank()}").touch()
    until(Path(folder, "saved"))
    sys.exit(EXIT_RESTART)


def takes_even_numbers(ranks: int) -> list[str]:
    return [f"{ranks} is odd; take an even number."] if ranks % 2 else []
