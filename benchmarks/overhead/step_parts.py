"""The cost of a step beyond the step: by hand, with Shoal, without guards, in an older checkout.

    python -m benchmarks.overhead.step_parts --older ../shoal-before
    python -m benchmarks.overhead.step_parts --network transformer --strategy zero3

          hand 1 rank   sleeps ▓ sleeps ............   every candidate has its own processes, which
          shoal         .......  ▓ .................   take turns in a new order each round, since
          unguarded     .........  ▓ ...............   two checkouts of one package do not go into
          older         ...........  ▓ .............   one process

A turn is the median time of its steps on the slower rank, so a step that another program has
interrupted does not count, nor does one that stops for rare work. Differences are formed within a
round. On a busy machine nearly all turns are disturbed: the fastest turn tells more then. Processes
of one program differ by some microseconds for all of their lives, with the place of their memory,
so all are started several times, and `fastest` is the median of the fastest turns of all starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from benchmarks.report_page import circumstances, write_result

HERE = Path(__file__).parent
WORKER = HERE / "step_worker.py"
CHECKOUT = HERE.parents[1]
WARM_UP = 3  # turns that do not count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=5, help="of all processes, anew")
    parser.add_argument("--rounds", type=int, default=30, help="after each start")
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--network", default="mlp", help="of step_worker.py")
    parser.add_argument("--strategy", default="ddp", help="by hand is DistributedDataParallel")
    parser.add_argument("--older", type=Path, help="a checkout to compare with")
    parser.add_argument("--older-worker", type=Path, help="as step_worker.py, for an older API")
    parser.add_argument("--own-batches", action="store_true", help="Shoal knows no loader")
    parser.add_argument("--out", type=Path, help="add the times of all rounds to this JSON")
    options = parser.parse_args()
    facts = circumstances(("torch", "shoal"))
    found = {}
    own = ["--network", options.network, "--strategy", options.strategy]
    own += ["--own-batches"] if options.own_batches else []
    programs = {name: (CHECKOUT, WORKER, [name, *own]) for name in ("hand", "shoal", "unguarded")}
    if options.older is not None:
        worker = options.older_worker or WORKER
        programs["older"] = (options.older, worker, ["shoal", *own])
    for ranks in options.ranks:
        times_s: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(options.starts):
            candidates = {name: Candidate(*what, ranks) for name, what in programs.items()}
            in_turns(candidates, options.steps, options.rounds, times_s)
            for candidate in candidates.values():
                candidate.end()
        found[f"{ranks}"] = times_s
        print(f"{ranks} rank{'s' if ranks > 1 else ''}")
        print("\n".join(told_times(times_s, options.starts)), flush=True)
    if options.out is not None:
        result = json.loads(options.out.read_text()) if options.out.exists() else {}
        batches = "the script's own batches" if options.own_batches else "batches of a loader"
        result[batches] = {
            "circumstances": facts,
            "older": "" if options.older is None else commit_of(options.older),
            "starts": options.starts,
            "step_s": found,
        }
        write_result(options.out, result)


def commit_of(checkout: Path) -> str:
    """Return the short name of the commit that a checkout is at."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Candidate:
    """The processes of one candidate, which sleep unless it is their turn."""

    def __init__(self, checkout: Path, worker: Path, arguments: list[str], ranks: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = []
        for rank in range(ranks):
            variables = {
                "PYTHONPATH": str(checkout.resolve()),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            process = subprocess.Popen(
                [sys.executable, str(worker), *arguments],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)

    def turn(self, steps: int) -> float:
        """Return the median time of so many steps on the slower rank, in seconds."""
        for process in self._processes:
            print(steps, file=process.stdin, flush=True)
        return max(float(process.stdout.readline()) for process in self._processes)

    def end(self) -> None:
        """Let the processes end together, as they do under servers, and wait for them."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def in_turns(
    candidates: dict[str, Candidate], steps: int, rounds: int, times_s: dict[str, list[float]]
) -> None:
    """Add the times of all candidates, a number for each round."""
    chance = random.Random(0)
    for counted in [False] * WARM_UP + [True] * rounds:
        for name in chance.sample(list(candidates), len(candidates)):
            time_s = candidates[name].turn(steps)
            if counted:
                times_s[name].append(time_s)


def told_times(times_s: dict[str, list[float]], starts: int) -> list[str]:
    """Return a line for each candidate, and for each difference that is asked for."""
    lines = [f"  {'us':20s}{'median':>8s}  {'(quartiles)':18s}{'fastest':>14s}"]
    lines += [_line(name, values, fastest(values, starts)) for name, values in times_s.items()]
    pairs = [("shoal", "hand"), ("shoal", "unguarded"), ("shoal", "older"), ("older", "hand")]
    for name, other in pairs:
        if name in times_s and other in times_s:
            ours, others = times_s[name], times_s[other]
            differences = [a - b for a, b in zip(ours, others, strict=True)]
            best = fastest(ours, starts) - fastest(others, starts)
            lines.append(_line(f"{name} - {other}", differences, best))
    if "older" in times_s:
        lines.append(_told_ratio(times_s["shoal"], times_s["older"], starts))
    return lines


def _told_ratio(ours: list[float], others: list[float], starts: int) -> str:
    """Return the ratios of the starts: of the fastest turns, and of the medians."""
    turns = len(ours) // starts
    ratios = []
    for measure in (min, median):
        values = []
        for start in range(starts):
            part = slice(start * turns, (start + 1) * turns)
            values.append(measure(ours[part]) / measure(others[part]))
        ratios.append(f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    return f"  shoal / older by start: fastest turns {ratios[0]}, median turns {ratios[1]}"


def fastest(values_s: Sequence[float], starts: int) -> float:
    """Return the median, over the starts, of the fastest turn."""
    turns = len(values_s) // starts
    return median(min(values_s[start * turns :][:turns]) for start in range(starts))


def _line(name: str, values_s: Sequence[float], fastest_s: float) -> str:
    low, middle, high = (f"{value * 1e6:.0f}" for value in quantiles(values_s, n=4))
    return f"  {name:20s}{middle:>8s}  {f'({low} to {high})':18s}{fastest_s * 1e6:14.0f}"


if __name__ == "__main__":
    main()
