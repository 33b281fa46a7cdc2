"""Train the same tasks by ddp and through servers, over some seeds. `make bench-convergence`.

A run that has ended is kept in result.json at once, and is not made again: interrupt it, and start
it again, as you like; or let it make a part of them, by --tasks and --seeds."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.convergence.cases import CASES, TASKS, WORKERS, Case, Task
from benchmarks.report_page import circumstances, write_result

RESULT = Path(__file__).with_name("result.json")
AHEAD = re.compile(r"ahead of the slowest when it read: (.*)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    options = parser.parse_args()
    result = {"circumstances": circumstances(("torch", "shoal")), "runs": []}
    if RESULT.exists():
        result = json.loads(RESULT.read_text())
    known = {(run["task"], run["case"], run["seed"]) for run in result["runs"]}
    # All strategies of a seed before the next: what an interruption leaves can be compared.
    for seed, task, (name, case) in itertools.product(options.seeds, options.tasks, CASES.items()):
        if task in case.tasks and (task, name, seed) not in known:
            found = train(TASKS[task], case, seed)
            result["runs"].append({"task": task, "case": name, "seed": seed, **found})
            _keep(result)
            print(task, name, seed, found, flush=True)


def train(task: Task, case: Case, seed: int) -> dict[str, Any]:
    """One whole run: its last evaluation, its time, and how stale its reads were, in percent of
    them.
    """
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        out = Path(folder) / "run"
        flags = [*task.argv, *case.argv, "--strategy", case.strategy, "--seed", str(seed)]
        argv = [sys.executable, "-m", "shoal", "train", "-n", str(WORKERS), *flags]
        argv += ["--out", str(out)]
        made = subprocess.run(
            argv, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        if made.returncode:
            raise SystemExit(
                f"{shlex.join(argv)}\nended with {made.returncode}:\n{made.stdout}\n{made.stderr}"
            )
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    # The run's own time: without its start and its evaluations.
    found = {"loss": last["loss"], "top1": last["top1"], "train_s": last["time_s"]}
    ahead = AHEAD.search(made.stdout + made.stderr)
    shares = [] if ahead is None else [share.split(": ") for share in ahead[1].split(", ")]
    return found | {
        "ahead_percent": {steps: float(share.removesuffix(" %")) for steps, share in shares}
    }


def _keep(result: dict[str, Any]) -> None:
    partial = RESULT.with_suffix(".tmp")
    write_result(partial, result)
    os.replace(partial, RESULT)


if __name__ == "__main__":
    main()
