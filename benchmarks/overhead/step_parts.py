"""The fixed cost of a step: the tiny MLP by hand, with Shoal, without guards, in an older checkout.

    python -m benchmarks.overhead.step_parts --older ../shoal-before

          hand 1 rank   sleeps ▓ sleeps ............   every candidate has its own processes, which
          shoal         .......  ▓ .................   take turns in a new order each round, since
          unguarded     .........  ▓ ...............   two checkouts of one package do not go into
          older         ...........  ▓ .............   one process

A turn is the median time of its steps on the slower rank, so a step that another program has
interrupted does not count, nor does one that stops for rare work. Differences are formed within a
round. On a busy machine nearly all turns are disturbed: the lowest tenth of the turns tells more
then.
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
from statistics import quantiles

from benchmarks.report_page import circumstances

HERE = Path(__file__).parent
RESULT = HERE / "step_parts.json"
WORKER = HERE / "step_worker.py"
CHECKOUT = HERE.parents[1]
WARM_UP = 3  # turns that do not count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--older", type=Path, help="a checkout to compare with")
    parser.add_argument("--older-worker", type=Path, help="as step_worker.py, for an older API")
    parser.add_argument("--own-batches", action="store_true", help="Shoal knows no loader")
    parser.add_argument("--out", type=Path, help="write the times of all rounds as JSON")
    options = parser.parse_args()
    facts = circumstances(("torch", "shoal"))
    found = {}
    own = ["--own-batches"] if options.own_batches else []
    for ranks in options.ranks:
        candidates = {
            name: Candidate(CHECKOUT, WORKER, [name, *own], ranks)
            for name in ("hand", "shoal", "unguarded")
        }
        if options.older is not None:
            worker = options.older_worker or WORKER
            candidates["older"] = Candidate(options.older, worker, ["shoal", *own], ranks)
        found[f"{ranks}"] = in_turns(candidates, options.steps, options.rounds)
        for candidate in candidates.values():
            candidate.end()
        print(f"{ranks} rank{'s' if ranks > 1 else ''}")
        print("\n".join(told_times(found[f"{ranks}"])), flush=True)
    if options.out is not None:
        result = {"circumstances": facts, "step_s": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


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
        """Let the processes end, and wait for them."""
        for process in self._processes:
            process.communicate()


def in_turns(candidates: dict[str, Candidate], steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of all candidates, a number for each round."""
    chance, times_s = random.Random(0), {name: [] for name in candidates}
    for counted in [False] * WARM_UP + [True] * rounds:
        for name in chance.sample(list(candidates), len(candidates)):
            time_s = candidates[name].turn(steps)
            if counted:
                times_s[name].append(time_s)
    return times_s


def told_times(times_s: dict[str, list[float]]) -> list[str]:
    """Return a line for each candidate, and for each difference that is asked for."""
    lines = [f"  {'us':20s}{'median':>8s}  {'(quartiles)':18s}{'lowest tenth':>14s}"]
    lines += [_line(name, values, _lowest(values)) for name, values in times_s.items()]
    pairs = [("shoal", "hand"), ("shoal", "unguarded"), ("shoal", "older"), ("older", "hand")]
    for name, other in pairs:
        if name in times_s and other in times_s:
            ours, others = times_s[name], times_s[other]
            differences = [a - b for a, b in zip(ours, others, strict=True)]
            lines.append(_line(f"{name} - {other}", differences, _lowest(ours) - _lowest(others)))
    return lines


def _lowest(values_s: Sequence[float]) -> float:
    """Return the first decile."""
    return quantiles(values_s, n=10)[0]


def _line(name: str, values_s: Sequence[float], lowest_s: float) -> str:
    low, middle, high = (f"{value * 1e6:.0f}" for value in quantiles(values_s, n=4))
    return f"  {name:20s}{middle:>8s}  {f'({low} to {high})':18s}{lowest_s * 1e6:14.0f}"


if __name__ == "__main__":
    main()
