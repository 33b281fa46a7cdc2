"""How long each algorithm takes on these ranks: rows of a table for `auto`.

1 KiB, round 1   tree  ring  backend  ...      so many calls each after a barrier; the slowest rank's time counts;
1 KiB, round 2   ring  backend  tree  ...      the order is drawn anew in every round, and the median is kept
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shoal.comm.algorithms.all_reduce import NamedAllReduce
from shoal.comm.algorithms.table import NAMES
from shoal.comm.axis import Axis
from shoal.comm.layout import Degrees
from shoal.comm.mesh import join, leave
from shoal.launch.environment import read

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 25 << 20)
"""From the smallest bucket to the largest: DistributedDataParallel's are of up to 25 MiB."""
ROUNDS = 5
TURN_S = 0.2
"""How long one algorithm is called in one round, about."""


def measured(axis: Axis, sizes_bytes: Sequence[int] = SIZES_BYTES, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Rows of a table, for this line of ranks. Collective over the world."""
    algorithms = {name: NamedAllReduce(name, axis) for name in NAMES}
    hosts = len(algorithms["ring"].hosts)
    # With one rank on each host, a ring of leaders is the ring.
    names = [name for name in NAMES if name != "hierarchical" or hosts < axis.size]
    rows = []
    for size_bytes in sizes_bytes:
        taken_s: dict[str, list[float]] = {name: [] for name in names}
        tensor = torch.zeros(size_bytes // 4)
        for number in range(rounds + 1):
            for name in random.Random(number).sample(names, len(names)):
                calls = 1 if number == 0 else max(1, int(TURN_S / taken_s[name][0]))
                taken_s[name].append(_turn(axis, algorithms[name], tensor, calls))
        seconds = {name: float(f"{median(times[1:]):.3g}") for name, times in taken_s.items()}
        rows.append({"hosts": hosts, "ranks": axis.size, "size_bytes": size_bytes, "seconds": seconds})
    for algorithm in algorithms.values():
        algorithm.close()
    return rows


def merged(before: Sequence[dict[str, Any]], machine: str, rows: Sequence[dict[str, Any]]) -> str:
    """The text of a table: the rows before, those of the same worlds replaced by these."""
    worlds = {(row["hosts"], row["ranks"]) for row in rows}
    kept = [row for row in before if (row["hosts"], row["ranks"]) not in worlds]
    ordered = sorted([*kept, *rows], key=lambda row: (row["hosts"], row["ranks"], row["size_bytes"]))
    lines = ",\n".join(f"  {json.dumps(row)}" for row in ordered)
    return f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n{lines}\n ]\n}}\n'


def this_machine() -> str:
    """For the table's head, where nobody has given it a better name."""
    return f"{platform.node()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def measure(file: Path, machine: str) -> None:
    """Be one rank; the first one writes the file. Collective."""
    mesh = join(read(os.environ), helpers=False, degrees=Degrees())
    rows = measured(mesh)
    if mesh.rank == 0:
        before = json.loads(file.read_text())["rows"] if file.exists() else []
        file.write_text(merged(before, machine, rows))
        for row in rows:
            seconds = ", ".join(f"{name} {1e3 * second:.3g} ms" for name, second in row["seconds"].items())
            print(f"{row['size_bytes'] / 1024:>8g} KiB: {seconds}")
    leave()


def _turn(axis: Axis, algorithm: NamedAllReduce, tensor: torch.Tensor, calls: int) -> float:
    """Seconds of a call, the slowest rank's; the same on every rank."""
    axis.barrier()
    started_s = time.perf_counter()
    for _ in range(calls):
        algorithm.mean(tensor)
    taken_s = torch.tensor([(time.perf_counter() - started_s) / calls], dtype=torch.float64)
    return float(axis.largest(taken_s))
