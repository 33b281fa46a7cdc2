"""Seconds from a SIGKILL, and from `shoal scale`, to the next step that is done. Run it by `make
bench-restart`.

    shoal train digits -n 4      a rank is killed  ── steps ──  scale 3 ── steps ── scale 4 ── ...

Which rank is killed, and when, follows from a seed. A step is done when its line is in
metrics.jsonl."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report_page import circumstances, write_result
from benchmarks.watched_training import WatchedTraining

HERE = Path(__file__).parent
RESULT = HERE / "result.json"
RANKS = 4
STRATEGIES = ("ddp", "server=2")
SETTINGS = "--train.epochs 100000 --log.every 1 --log.tensorboard false --restarts 1000"


class Training(WatchedTraining):
    """`shoal train digits`, whose ranks leave their process ids in a folder."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.notes = folder / "notes"
        self.notes.mkdir()
        words = ["digits", "-n", str(RANKS), "--strategy", strategy, *SETTINGS.split()]
        words += ["--plugin", str(HERE / "pid_notes.py")]
        super().__init__(folder / "run", words, {"NOTES": str(self.notes)})

    def gone_on(self, since_s: float, known: int) -> dict[str, float]:
        """Return the seconds until ranks were started again, had resumed, and had done a step."""
        started_s, _ = self.until(lambda: self.first(" from the checkpoint of step ", known))
        resumed_s, step = self.resumed(known)
        self.until(lambda: self.step() > step)
        return {
            "started": started_s - since_s,
            "resumed": resumed_s - since_s,
            "step": time.monotonic() - since_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    result: dict[str, Any] = {"circumstances": circumstances(("torch", "shoal")), "seconds": {}}
    for strategy in STRATEGIES:
        result["seconds"][strategy] = measured(strategy, options.rounds)
        write_result(RESULT, result)


def measured(strategy: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the times of each event, one of each round."""
    chance = random.Random(strategy)
    kinds = ("SIGKILL", "scale 4 to 3", "scale 3 to 4")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), strategy)
        try:
            for _ in range(rounds):
                settle(training, chance)
                pid = int((training.notes / str(chance.randrange(RANKS))).read_text())
                known, since_s = len(training.lines), time.monotonic()
                os.kill(pid, signal.SIGKILL)
                found["SIGKILL"].append(training.gone_on(since_s, known))
                for name in kinds[1:]:
                    settle(training, chance)
                    known, since_s = len(training.lines), time.monotonic()
                    words = [sys.executable, "-m", "shoal", "scale", str(training.directory)]
                    with subprocess.Popen([*words, name.split()[-1]], stdout=subprocess.DEVNULL):
                        found[name].append(training.gone_on(since_s, known))
        finally:
            training.end(signal.SIGINT)
    return found


def settle(training: Training, chance: random.Random) -> None:
    """A checkpoint more than now, and up to a second of steps."""
    saved = training.saved()
    training.until(lambda: training.saved() != saved)
    time.sleep(chance.random())


if __name__ == "__main__":
    main()
