"""`python -m shoal` without a process of its own: here, or in the ranks of a small world."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from typing import NamedTuple

import torch

from shoal.testing import world


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def shoal(*words: object) -> Ended:
    """Run the command line in this process; what starts ranks must not be called so."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["shoal", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("shoal", run_name="__main__")
    except SystemExit as ended:
        return Ended(_status(ended.code), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    return Ended(0, out.getvalue(), err.getvalue())


def shoal_in_ranks(ranks: int, *words: object) -> None:
    """Run the command line in every rank of a world, as torchrun does. Fails where it fails."""
    ends = world.run(ranks, _as_a_rank, [str(word) for word in words])
    for rank, ended in enumerate(ends):
        assert ended.code == 0, f"shoal {' '.join(map(str, words))}, rank {rank}:\n{ended.err}"


def _as_a_rank(words: list[str]) -> Ended:
    torch.set_num_threads(1)
    return shoal(*words)


def _status(code: object) -> int:
    return code if isinstance(code, int) else int(code is not None)
