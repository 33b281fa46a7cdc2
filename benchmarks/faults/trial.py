"""One trial: a run that meets a fault, and the bits that it ends with."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.faulty_run import FaultyRun
from benchmarks.faults.kinds import Cell
from benchmarks.faults.outside_faults import EXIT_CODES, OUTSIDE_FAULTS

TRIAL_S = 150.0
AGAIN = ", given again"


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial.

    Attributes:
        problem: what did not hold; empty where the run ended by itself, with the bits of a run
            without a fault.
        told_s, step_s: seconds from the fault until it was told, and until a step was done.
    """

    cell: Cell
    seed: int
    problem: str
    told_s: float | None
    step_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in the record."""
        own = {"strategy": self.cell.strategy, "seed": self.seed, "held": not self.problem}
        return own | {"problem": self.problem, "told_s": self.told_s, "step_s": self.step_s}


@contextlib.contextmanager
def place_of(cell: Cell) -> Iterator[tuple[Path, Any]]:
    """Make an empty folder for a run, and its hosts: None for this one."""
    with tempfile.TemporaryDirectory() as folder:
        if cell.place == "one host":
            yield Path(folder), None
            return
        from namespaces import Hosts  # type: ignore[import-not-found]  # of tests/hosts

        with Hosts(Path(folder, "hosts"), 3) as hosts:
            yield hosts.shared, hosts


def undisturbed(cell: Cell) -> str:
    """Return the outcome of a run without a fault."""
    with place_of(cell) as (folder, hosts):
        run = FaultyRun(folder, cell.line, cell.counts, cell.settings, hosts)
        run.process.wait(TRIAL_S)
        if run.close() != 0:
            raise SystemExit(run.text())
        return run.outcome(cell.is_exact)


def make_trial(cell: Cell, seed: int, order: Mapping[str, Any], expected: str) -> Trial:
    """Run once with a fault.

    Args:
        order: the rank and the step of the fault, and the host.
        expected: the outcome of a run without a fault.
    """
    with place_of(cell) as (folder, hosts):
        (folder / f"order.{order['rank']}").write_text(json.dumps(order))
        words = folder, cell.line, cell.counts, cell.settings, hosts, order["host"]
        run = FaultyRun(*words)
        told, step_s = _watch(run, cell.fault)
        code = run.close()
        problem = ""
        if cell.fault.endswith(AGAIN):
            problem = _first_end(run, cell.fault, code)
            run = FaultyRun(*words)
            _watch(run, "")
            code = run.close()
        since_s = _met_s(folder / "met")
        told = told or run.first(r"restart \d+ of|is slow")
        problem = problem or _problem(run, cell, order["rank"], expected, code)
        if since_s is None:
            problem = f"the fault did not happen; {problem}"
        if problem:
            print(problem, run.text()[-3000:], file=sys.stderr)
    return Trial(
        cell,
        seed,
        problem,
        None if told is None or since_s is None else told[0] - since_s,
        None if step_s is None or since_s is None else step_s - since_s,
    )


def _first_end(run: FaultyRun, fault: str, code: int | None) -> str:
    """Return what is wrong with the end of a command that the fault has ended."""
    wanted = EXIT_CODES.get(fault)
    if code is None:
        return "the command did not end"
    if wanted is not None and code not in (wanted, 128 - wanted if wanted < 0 else wanted):
        return f"exit code {code}, not {wanted}"
    return "" if run.is_clear() else "processes were left"


def _problem(run: FaultyRun, cell: Cell, rank: int, expected: str, code: int | None) -> str:
    """Return what did not hold; empty where all did."""
    if code != 0:
        return "the run did not end" if code is None else f"the run ended with {code}"
    if run.outcome(cell.is_exact) != expected:
        return f"other bits: {run.outcome(cell.is_exact)} in place of {expected}"
    if cell.fault == "slow" and not run.first(f"rank {rank} (on .* )?of .* is slow"):
        return "the slow rank was not named"
    return "" if run.is_clear() else "processes were left"


def _watch(run: FaultyRun, fault: str) -> tuple[tuple[float, str] | None, float | None]:
    """Wait for the end of a run.

    Return the line that tells, and the time of the next step.

    Steps that were done before the fault are done again after a restart. The next step is the first
    one that is done after the run has resumed, or after the fault where it goes on in place.
    """
    end_s = time.monotonic() + TRIAL_S
    met, act = run.folder / "met", OUTSIDE_FAULTS.get(fault)
    acting = threading.Thread(target=lambda: act(run) if act else None)
    told = step_s = None
    has_begun = False
    while run.process.poll() is None and time.monotonic() < end_s:
        time.sleep(0.01)
        if met.exists() and not has_begun:
            has_begun = True
            acting.start()
        if told is None and met.exists():
            told = run.first(r"restart \d+ of")
        if step_s is None and told is not None:
            resumed = run.first("resumed from")
            found = re.search(r"step[- ](\d+)", resumed[1]) if resumed else None
            if found is not None and run.step() > int(found[1]):
                step_s = time.monotonic()
    if has_begun:
        acting.join()
    return told, step_s


def _met_s(path: Path) -> float | None:
    return float(path.read_text()) if path.exists() else None
