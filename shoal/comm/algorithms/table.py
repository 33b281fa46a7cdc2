"""Which algorithm is the fastest, as it was measured: `auto` asks here. This file needs no torch.

size        64 ranks on 8 hosts: not measured       8 ranks on 4 hosts: the nearest row
1 KiB                                               tree 1.2 ms   ring 7.9 ms   ...      -> tree
1 MiB                                               tree  90 ms   ring  31 ms   ...      -> ring
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, did_you_mean

MEASURED = Path(__file__).with_name("measured.json")
"""The table that comes with Shoal. It names the machine it was measured on."""
NAMES = ("backend", "ring", "tree", "halving-doubling", "hierarchical")
"""What can be measured; `backend` is the group's own all-reduce."""
CHOICES = (*NAMES, "auto")


def refuse_unknown(name: str, table: str) -> None:
    """Raise ConfigError unless `name` is one of CHOICES, and `table` stands beside `auto` only."""
    if name not in CHOICES:
        raise ConfigError([f"allreduce={name}: not known; {did_you_mean(name, CHOICES)}"])
    if table and name != "auto":
        raise ConfigError([f"table={table}: only allreduce=auto reads a table; this is allreduce={name}"])


@dataclass(frozen=True)
class Row:
    """Seconds of each algorithm for one size on one set of hosts."""

    hosts: int
    ranks: int
    size_bytes: int
    seconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name])


@dataclass(frozen=True)
class Table:
    """Rows, and where they were measured."""

    machine: str
    rows: tuple[Row, ...]

    def for_ranks(self, ranks: int, hosts: int) -> list[Row]:
        """The rows of the world that is nearest, first in hosts, then in ranks; by size."""
        near = min(self.rows, key=lambda row: (_apart(row.hosts, hosts), _apart(row.ranks, ranks)))
        mine = [row for row in self.rows if (row.hosts, row.ranks) == (near.hosts, near.ranks)]
        return sorted(mine, key=lambda row: row.size_bytes)


def fastest(rows: list[Row], size_bytes: int) -> str:
    """The algorithm for a tensor, by the row whose size is nearest. Args: rows: of one world, by size."""
    return min(rows, key=lambda row: _apart(row.size_bytes, max(size_bytes, 1))).fastest


def described(rows: list[Row]) -> str:
    """`tree from 1 KiB, ring from 256 KiB`."""
    words: list[str] = []
    for row, before in zip(rows, [None, *rows], strict=False):
        if before is None or before.fastest != row.fastest:
            words.append(f"{row.fastest} from {row.size_bytes / 1024:g} KiB")
    return ", ".join(words)


def parse(text: str, source: str) -> Table:
    """A table from JSON. Raises ConfigError: that is none. Args: source: where it is from, for the error."""
    if not text:
        raise ConfigError([f"{source}: there is no such file, or it is empty or no text; {CURE}"])
    try:
        found = json.loads(text)
        rows = tuple(_row(row) for row in found["rows"])
        machine = str(found["machine"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{source}: not a table of all-reduces ({error!r}); {CURE}"]) from None
    unknown = sorted({name for row in rows for name in row.seconds} - set(NAMES))
    problems = [f"{source}: algorithm '{name}' is not known; {did_you_mean(name, NAMES)}" for name in unknown]
    if not rows or any(not row.seconds or row.size_bytes < 1 or min(row.hosts, row.ranks) < 1 for row in rows):
        problems.append(f"{source}: each row needs hosts, ranks and size_bytes >= 1, and seconds by algorithm; {CURE}")
    if any(not second > 0 for row in rows for second in row.seconds.values()):
        problems.append(f"{source}: seconds must be above 0; {CURE}")
    if problems:
        raise ConfigError(problems)
    return Table(machine, rows)


CURE = "make one by `python -m shoal.comm.algorithms.measure FILE`"


def _row(found: Mapping[str, Any]) -> Row:
    seconds = {str(name): float(second) for name, second in found["seconds"].items()}
    return Row(int(found["hosts"]), int(found["ranks"]), int(found["size_bytes"]), seconds)


def _apart(one: float, other: float) -> float:
    return abs(math.log(one / other))
