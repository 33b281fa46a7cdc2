"""Seconds from a SIGKILL to the next step, and steps done twice. Run it by `make bench-recovery`.

Candidates take turns: each round starts every one of them anew, kills once, and ends it. Which rank
is killed, and after how many steps, follows from a seed. torchft is measured where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.recovery.peer_training import EVERY
from benchmarks.report_page import circumstances
from benchmarks.watched_training import WatchedTraining

HERE = Path(__file__).parent
RESULT = HERE / "result.json"
LIMIT_S = 60.0
SETTINGS = {
    "model.name": "mlp",
    "train.epochs": 100_000,
    "checkpoint.every_steps": EVERY,
    "log.every": 1,
    "log.tensorboard": "false",
    "optimizer.lr": 0.01,
}
Recovery = dict[str, float]


class Timeout(Exception):
    """Nothing happened for too long."""


def shoal(strategy: str, victim: str, folder: Path, chance: random.Random) -> Recovery:
    """Kill a rank, or a server, of `shoal train`."""
    notes = folder / "notes"
    notes.mkdir()
    words = ["digits", "-n", "2", "--strategy", strategy, "--import", str(HERE / "pid_notes.py")]
    words += [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
    training = WatchedTraining(folder / "run", words, {"NOTES": str(notes)})
    try:
        first = EVERY + chance.randrange(EVERY, 3 * EVERY)
        training.until(lambda: training.saved() and training.step() >= first)
        name = victim if victim == "server" else str(chance.randrange(2))
        pid, known = int((notes / name).read_text()), len(training.lines)
        before, since_s = training.step(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if victim == "server":  # a step may have been done that was not written yet
            training.until(lambda: training.step() > before + 1)
            return {"step_s": time.monotonic() - since_s, "lost": 0}
        _, resumed = training.resumed(known)
        training.until(lambda: training.step() > resumed)
        return {"step_s": time.monotonic() - since_s, "lost": before - resumed}
    finally:
        training.end(signal.SIGINT)


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


T = TypeVar("T")
Line = tuple[float, int, int, int]


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


CANDIDATES: dict[str, Callable[[Path, random.Random], Recovery]] = {
    "Shoal ddp, a rank": partial(shoal, "ddp", "rank"),
    "Shoal server=2,replicas=2, a rank": partial(shoal, "server=2,replicas=2", "rank"),
    "Shoal server=2,replicas=2, a server": partial(shoal, "server=2,replicas=2", "server"),
    "torchrun --max-restarts, a rank": torchrun,
    "torchft, a replica": torchft,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    chosen = dict(CANDIDATES)
    packages = ["torch", "shoal"]
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed: pip install torchft-nightly", file=sys.stderr)
        del chosen["torchft, a replica"]
    else:
        packages.append("torchft-nightly")
    result: dict[str, Any] = {
        "circumstances": circumstances(packages),
        "recoveries": {name: [] for name in chosen},
    }
    chance = random.Random(0)
    for _ in range(options.rounds):
        for name in chance.sample(list(chosen), len(chosen)):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found: Recovery | None = chosen[name](Path(folder), chance)
                except Timeout:
                    found = None
                    output = Path(folder, "output")
                    if output.exists():
                        print(output.read_text()[-2000:], file=sys.stderr)
            result["recoveries"][name].append(found)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(name, found, flush=True)


if __name__ == "__main__":
    main()
