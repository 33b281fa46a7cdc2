"""Seconds from the command to the first all-reduce and to the first step on all ranks. Run it by
`make bench-launch`.

    round 1   1 rank: mpirun  shoal  torchrun  accelerate    2 ranks: torchrun  mpirun ...
    round 2   ...             each once with reduce.py, once with step.py, in a new order

One command runs at a time. The first round is not counted: it loads files into the page cache, for
all launchers alike."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.launch.launchers import Command, installed
from benchmarks.report_page import circumstances, write_result

RESULT = Path(__file__).with_name("result.json")
LIMIT_S = 120

SCRIPTS = [str(Path(__file__).with_name(name)) for name in ("reduce.py", "step.py")]

Times = dict[str, dict[str, list[dict[str, float]]]]
"""Launcher -> number of ranks -> seconds to each mark, of every round."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    facts = circumstances(("torch", "shoal", "accelerate"))
    launchers, chance = installed(), random.Random(0)
    times_s: Times = {name: {str(ranks): [] for ranks in options.ranks} for name in launchers}
    for counted in [False] + [True] * options.rounds:
        for ranks in options.ranks if counted else options.ranks[:1]:
            for name in chance.sample(list(launchers), len(launchers)):
                # It binds each process to a core and is refused by Open MPI when there are more
                # processes.
                if name == "accelerate launch" and ranks > (os.cpu_count() or 1):
                    continue
                seconds: dict[str, float] = {}
                for script in SCRIPTS:
                    with tempfile.TemporaryDirectory() as folder:
                        seconds |= timed(
                            launchers[name](ranks, script, Path(folder)), ranks, Path(folder)
                        )
                if counted:
                    times_s[name][str(ranks)].append(seconds)
        # After every round, so that a run that is cut short has measured something.
        write_result(options.out, {"circumstances": facts, "times_s": times_s})


def timed(command: Command, ranks: int, folder: Path) -> dict[str, float]:
    """Run one command; seconds until the last rank had reached each mark of its script."""
    words, variables = command
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    started_s = time.monotonic()
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    # What counts is in the notes. The exit code does not: ranks of torch 2.13 can abort while they
    # leave.
    notes = [
        json.loads(note.read_text())
        for rank in range(ranks)
        if (note := folder / str(rank)).exists()
    ]
    if len(notes) < ranks:
        raise SystemExit(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stderr}")
    if [note["world"] for note in notes] != [ranks] * ranks:
        raise SystemExit(
            f"{' '.join(words)} made worlds of {[note['world'] for note in notes]} ranks, not "
            f"{ranks}"
        )
    return {
        mark: max(note[mark] for note in notes) - started_s for mark in notes[0] if mark != "world"
    }


if __name__ == "__main__":
    main()
