"""Kills ranks of other libraries, and waits for their next steps."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.recovery.peer_training import EVERY

LIMIT_S = 60.0
Recovery = dict[str, float]
Line = tuple[float, int, int, int]
T = TypeVar("T")


class Timeout(Exception):
    """Nothing happened for too long."""


def torchrun(folder: Path, chance: random.Random) -> Recovery:
    """Kill a rank under torchrun, which starts all again."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["--max-restarts", "3", "-m", "benchmarks.recovery.peer_training", "torchrun"]
    with started([sys.executable, *words, str(folder)], folder):
        first = EVERY + chance.randrange(EVERY, 3 * EVERY)
        until(lambda: steps(folder, 0) and steps(folder, 0)[-1][1] >= first)
        pid = int((folder / f"pid.{chance.randrange(2)}").read_text())
        _, _, process, _ = steps(folder, 0)[-1]
        since_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        done_s, step = until(lambda: first_line(folder, 0, lambda line: line[2] != process))
        before = max(line[1] for line in steps(folder, 0) if line[2] == process)
        return {"step_s": done_s - since_s, "lost": before - step + 1}


def torchft(folder: Path, chance: random.Random) -> Recovery:
    """Kill one of two replicas, and start it again at once; the other goes on meanwhile."""
    address = "127.0.0.1:29510"
    program = shutil.which("torchft_lighthouse")
    assert program is not None
    words = [program, "--min_replicas", "1", "--bind", address, "--quorum_tick_ms", "100"]
    words += ["--join_timeout_ms", "2000", "--heartbeat_timeout_ms", "2000"]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{address}"
    own = [sys.executable, "-m", "benchmarks.recovery.peer_training", "torchft", str(folder)]
    with (
        started(words, folder),
        started([*own, "0"], folder) as one,
        started([*own, "1"], folder) as two,
    ):
        both = 2 * EVERY
        until(lambda: sum(line[3] == 2 for line in steps(folder, 0)) > both)
        time.sleep(chance.random())
        number = chance.randrange(2)
        since_s = time.monotonic()
        (one, two)[number].kill()
        with started([*own, str(number)], folder):
            other = 1 - number
            alone_s, _ = until(
                lambda: first_line(folder, other, lambda line: line[0] > since_s and line[3] == 1)
            )
            again_s, _ = until(
                lambda: first_line(folder, other, lambda line: line[0] > alone_s and line[3] == 2)
            )
    return {"step_s": alone_s - since_s, "all_s": again_s - since_s, "lost": 0}


def horovod(folder: Path, chance: random.Random) -> Recovery:
    """Kill one of two ranks of Horovod elastic, which goes on with the other, and starts it again.

    Each rank has a host of its own by name, for Horovod leaves out the host of a rank that died. It
    comes back after the shortest time that may be chosen, 1 s.
    """
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    program = shutil.which("horovodrun")
    assert program is not None
    words = [program, "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"]
    words += ["--blacklist-cooldown-range", "1", "2", "--host-discovery-script", str(hosts)]
    own = [sys.executable, "-m", "benchmarks.recovery.peer_training", "horovod", str(folder)]
    with started([*words, *own], folder):
        both = EVERY + chance.randrange(EVERY, 3 * EVERY)
        until(lambda: sum(line[3] == 2 for line in steps(folder, 0)) > both)
        killed = int((folder / f"pid.{chance.randrange(2)}").read_text())
        before = steps(folder, 0)[-1][1]
        since_s = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        alone_s, step = until(
            lambda: first_line(folder, 0, lambda line: line[0] > since_s and line[3] == 1)
        )
        again_s, _ = until(
            lambda: first_line(folder, 0, lambda line: line[0] > alone_s and line[3] == 2)
        )
    return {"step_s": alone_s - since_s, "all_s": again_s - since_s, "lost": before - step + 1}


class started:  # noqa: N801 - a context, used like a function
    """Runs a command; leaving the context kills it with its children."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.words, self.folder = words, folder

    def __enter__(self) -> subprocess.Popen[bytes]:
        with (self.folder / "output").open("ab") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                self.words,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def steps(folder: Path, number: int) -> list[Line]:
    """Return the lines of a process: time, step, process, ranks that took part."""
    path = folder / f"steps.{number}"
    text = path.read_text() if path.exists() else ""
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(float(at), int(step), int(pid), int(ranks)) for at, step, pid, ranks in rows]


def first_line(
    folder: Path, number: int, matches: Callable[[Line], bool]
) -> tuple[float, int] | None:
    found = next((line for line in steps(folder, number) if matches(line)), None)
    return None if found is None else found[:2]


def until(condition: Callable[[], T | None]) -> T:
    end_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        if time.monotonic() > end_s:
            raise Timeout
        time.sleep(0.005)
    return found
