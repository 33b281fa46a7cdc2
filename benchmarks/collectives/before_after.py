"""Compares the collectives of two checkouts, and prints a table. Writes nothing.

      python -m benchmarks.collectives.before_after ../shoal-before

      round 1   processes of before: all cells      processes of after: all cells
      round 2   after                               before                         and so on

Each round starts new processes of both, in an order that is drawn anew. The time of a cell is the
median batch of calls; a ratio is formed within a round. The older checkout needs its compiled part:
`python -m pip install -e` there, or a copy of the library that its C files give."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor

import shoal  # noqa: F401 - the backend
from benchmarks.report_page import table

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24, 1 << 26)
OTHERS = (1 << 10, 1 << 16, 1 << 22)  # of calls that are no all-reduce
BATCHES, MOST_CALLS, BATCH_BYTES = 15, 200, 1 << 26
Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("older", type=Path, help="the checkout of before")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    here = Path(__file__).parents[2]
    checkouts = {"before": options.older.resolve(), "after": here}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name in random.sample(list(checkouts), len(checkouts)):
            found[name].append(_start(checkouts[name], here, options.ranks))
    rows = []
    for cell in found["after"][0]:
        before, after = ([found_[cell] for found_ in found[name]] for name in ("before", "after"))
        low, middle, high = quantiles([a / b for a, b in zip(after, before, strict=True)], n=4)
        times = [f"{median(times_s) * 1e6:.1f} us" for times_s in (before, after)]
        rows.append([cell, *times, f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    print(table([f"{options.ranks} ranks", "before", "after", "after / before"], rows))


def _start(checkout: Path, here: Path, ranks: int) -> dict[str, float]:
    """Measure one checkout in processes of its own. Seconds for a call, by cell."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # The older package comes first; this program and its page are this checkout's.
        variables = os.environ | {"PYTHONPATH": f"{checkout}:{here}", "OMP_NUM_THREADS": "1"}
        variables |= {"RESULT": str(result), "WORLD_SIZE": str(ranks)}
        quiet = ["-W", "ignore::FutureWarning"]
        command = [sys.executable, *quiet, "-c", _PROGRAM, str(here), f"file://{folder}/store"]
        processes = [
            subprocess.Popen(command, env=variables | {"RANK": str(rank)}, cwd=folder)
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a rank of {checkout} failed")
        times_s: dict[str, float] = json.loads(result.read_text())
        return times_s


_PROGRAM = """
import sys
import shoal
sys.path.append(sys.argv[1])
from benchmarks.collectives import before_after
before_after.be_a_rank(sys.argv[2])
"""


def be_a_rank(store: str) -> None:
    """Measure all cells with the package that was imported. Collective."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:shoal", init_method=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    times_s = {name: _time(call, size) for name, size, call in _cells(ranks)}
    if rank == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(times_s))
    dist.barrier()
    dist.destroy_process_group()


def _cells(ranks: int) -> list[tuple[str, int, Call]]:
    cells: list[tuple[str, int, Call]] = []
    for size in SIZES:
        tensor = torch.ones(size // 4)
        cells.append((f"all_reduce, {_bytes(size)}", size, _bound(dist.all_reduce, tensor)))
    for size in OTHERS:
        tensor, whole = torch.ones(size // 4), torch.ones(size // 4 * ranks)
        cells += [
            (f"broadcast, {_bytes(size)}", size, _bound(dist.broadcast, tensor, 0)),
            (
                f"all_gather, {_bytes(size)} a rank",
                size * ranks,
                _bound(dist.all_gather_into_tensor, whole, tensor),
            ),
            (
                f"reduce_scatter, {_bytes(size)} a rank",
                size * ranks,
                _bound(dist.reduce_scatter_tensor, tensor, whole),
            ),
        ]
    return cells


def _bound(function: Callable[..., object], *arguments: Tensor | int) -> Call:
    return lambda: function(*arguments)


def _time(call: Call, size: int) -> float:
    calls = max(3, min(MOST_CALLS, BATCH_BYTES // size))
    times_s = []
    for _ in range(BATCHES):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times_s.append((time.perf_counter() - begin) / calls)
    return median(times_s[1:])


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


if __name__ == "__main__":
    main()
