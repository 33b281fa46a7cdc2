"""Seconds from a SIGKILL, and from `shoal scale`, to the next step that is done. Run it by `make
bench-restart`.

    shoal train digits -n 4      a rank is killed  ── steps ──  scale 3 ── steps ── scale 4 ── ...

Which rank is killed, and when, follows from a seed. A step is done when its line is in
metrics.jsonl."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.report_page import circumstances

HERE = Path(__file__).parent
RESULT = HERE / "result.json"
RANKS, LIMIT_S = 4, 60.0
STRATEGIES = ("ddp", "server=2")
SETTINGS = (
    "--train.epochs",
    "100000",
    "--log.every",
    "1",
    "--log.tensorboard",
    "false",
    "--restarts",
    "1000",
)


class Training:
    """`shoal train digits`, and what it says on stderr, with the time of each line."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.directory, self.notes = folder / "run", folder / "notes"
        self.notes.mkdir()
        words = [
            "train",
            "digits",
            "-n",
            str(RANKS),
            "--strategy",
            strategy,
            "--out",
            str(self.directory),
            *SETTINGS,
        ]
        words += ["--import", str(HERE / "pid_notes.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NOTES": str(self.notes)}
        command = [sys.executable, "-m", "shoal", *words]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line))

    def step(self) -> int:
        """The last that is done."""
        try:
            lines = (self.directory / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, ValueError, IndexError):
            return 0

    def saved(self) -> str:
        try:
            return (self.directory / "checkpoints/latest").read_text()
        except OSError:
            return ""

    def until(self, condition: Any) -> Any:
        end_s = time.monotonic() + LIMIT_S
        while not (found := condition()):
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise SystemExit("".join(line for _, line in self.lines))
            time.sleep(0.002)
        return found

    def gone_on(self, since_s: float, known: int) -> dict[str, float]:
        """Seconds until ranks were started again, had resumed, and had done a step."""
        started_s = self.until(lambda: self._said(known, " from the checkpoint of step "))[0]
        resumed_s, line = self.until(lambda: self._said(known, "resumed from"))
        found = re.search(r"step-(\d+)", line)
        assert found is not None
        self.until(lambda: self.step() > int(found[1]))
        return {
            "started": started_s - since_s,
            "resumed": resumed_s - since_s,
            "step": time.monotonic() - since_s,
        }

    def _said(self, known: int, text: str) -> tuple[float, str] | None:
        return next((line for line in self.lines[known:] if text in line[1]), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out.exists() else {"seconds": {}}
    result["circumstances"] = circumstances(("torch", "shoal"))
    for strategy in options.strategies:
        result["seconds"][strategy] = measured(strategy, options.rounds)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(strategy: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the times of each event, one of each round."""
    chance = random.Random(strategy)
    found: dict[str, list[dict[str, float]]] = {
        "SIGKILL": [],
        "scale 4 to 3": [],
        "scale 3 to 4": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), strategy)
        try:
            for _ in range(rounds):
                settle(training, chance)
                pid = int((training.notes / str(chance.randrange(RANKS))).read_text())
                known, since_s = len(training.lines), time.monotonic()
                os.kill(pid, signal.SIGKILL)
                found["SIGKILL"].append(training.gone_on(since_s, known))
                for name in ("scale 4 to 3", "scale 3 to 4"):
                    settle(training, chance)
                    known, since_s = len(training.lines), time.monotonic()
                    words = [
                        sys.executable,
                        "-m",
                        "shoal",
                        "scale",
                        str(training.directory),
                        name.split()[-1],
                    ]
                    with subprocess.Popen(words, stdout=subprocess.DEVNULL):
                        found[name].append(training.gone_on(since_s, known))
        finally:
            training.process.send_signal(signal.SIGINT)
            training.process.wait()
    return found


def settle(training: Training, chance: random.Random) -> None:
    """A checkpoint more than now, and up to a second of steps."""
    saved = training.saved()
    training.until(lambda: training.saved() != saved)
    time.sleep(chance.random())


if __name__ == "__main__":
    main()
