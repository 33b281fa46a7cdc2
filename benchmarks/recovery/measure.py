"""Seconds from a SIGKILL to the next step, and steps done twice. Run it by `make bench-recovery`.

Candidates take turns: each round starts every one of them anew, kills once, and ends it. Which
rank is killed, and after how many steps, follows from a seed. torchft and Horovod are measured
where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recovery.peer_training import EVERY
from benchmarks.recovery.peers import Recovery, Timeout, horovod, torchft, torchrun
from benchmarks.report_page import circumstances, write_result
from benchmarks.watched_training import WatchedTraining

HERE = Path(__file__).parent
RESULT = HERE / "result.json"
SETTINGS = {
    "model.name": "mlp",
    "train.epochs": 100_000,
    "checkpoint.every_steps": EVERY,
    "log.every": 1,
    "log.tensorboard": "false",
    "optimizer.lr": 0.01,
}


def shoal(strategy: str, victim: str, folder: Path, chance: random.Random) -> Recovery:
    """Kill a rank, or a server, of `shoal train`."""
    notes = folder / "notes"
    notes.mkdir()
    words = ["digits", "-n", "2", "--strategy", strategy, "--plugin", str(HERE / "pid_notes.py")]
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
        training.end(signal.SIGTERM)  # a shell's job in the background ignores SIGINT


CANDIDATES: dict[str, Callable[[Path, random.Random], Recovery]] = {
    "Shoal ddp, a rank": partial(shoal, "ddp", "rank"),
    "Shoal server=2,replicas=2, a rank": partial(shoal, "server=2,replicas=2", "rank"),
    "Shoal server=2,replicas=2, a server": partial(shoal, "server=2,replicas=2", "server"),
    "torchrun --max-restarts, a rank": torchrun,
    "torchft, a replica": torchft,
    "Horovod elastic, a rank": horovod,
}
PEERS = {  # the candidate -> (its module, its package, how it is installed)
    "torchft, a replica": ("torchft", "torchft-nightly", "pip install torchft-nightly"),
    "Horovod elastic, a rank": ("horovod", "horovod", "see benchmarks/recovery/README.md"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    chosen = dict(CANDIDATES)
    packages = ["torch", "shoal"]
    for name, (module, package, cure) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{module} is not installed: {cure}", file=sys.stderr)
            del chosen[name]
        else:
            packages.append(package)
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
            write_result(options.out, result)
            print(name, found, flush=True)


if __name__ == "__main__":
    main()
