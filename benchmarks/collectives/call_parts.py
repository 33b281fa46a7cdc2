"""Measures the parts of a small all-reduce on two ranks, and writes call_parts.json.

      torch.distributed ── checks, options ── group.allreduce ── checks, turn ── copy, wait, sum
      │                                       │                                  └ steps in C
      │                                       └ the group's own method
      └ all of it; over a group that does nothing: torch's part alone

All variants take turns in the same processes, in an order that is drawn anew in every round. A
machine that is busy makes most batches slow, so the fastest of very many short batches counts."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from benchmarks.collectives.candidates import DeepSpeed, OpenMpi
from benchmarks.collectives.measure import be_a_rank, start_ranks
from benchmarks.report_page import circumstances, write_result
from shoal.platform.torch_private.c10d import Options
from shoal.shm_backend.call_queue import CompletedWork
from shoal.shm_backend.group import ShoalGroup

RESULT = Path(__file__).with_name("call_parts.json")
RANKS, SIZE_BYTES, BATCH = 2, 1 << 10, 40
Call = Callable[[], object]


class OverMpi(dist.ProcessGroup):
    """A group that makes an all-reduce by `reduce` and checks nothing."""

    def __init__(self, rank: int, size: int, reduce: Callable[[Tensor], object]) -> None:
        super().__init__(rank, size)
        self._reduce, self._work = reduce, CompletedWork(())
        # torch.distributed asks these tables whether this rank is in the group.
        distributed_c10d._world.pg_map[self] = ("none", dist.HashStore())
        distributed_c10d._world.pg_group_ranks[self] = {rank: rank for rank in range(size)}

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self._reduce(tensors[0])
        return self._work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--part", type=Path, help="be one rank, and write here")
    options = parser.parse_args()
    if options.part:
        _measure(options.part, options.seconds)
        return
    facts = circumstances(("torch", "shoal"))
    part = RESULT.with_suffix(".part.json")
    found = start_ranks(
        RANKS, part, "benchmarks.collectives.call_parts", f"--seconds={options.seconds}"
    )
    write_result(RESULT, {"circumstances": facts, "parts_us": found})


def _variants(tensor: Tensor) -> dict[str, Call]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="cpu:shoal")
    nothing = OverMpi(rank, size, lambda _: None)
    assert isinstance(group, ShoalGroup)
    opts = Options.AllreduceOptions()
    opts.asyncOp = False
    calls: dict[str, Call] = {
        "torch.distributed, over a group that does nothing": lambda: dist.all_reduce(
            tensor, group=nothing
        ),
        "torch.distributed, shoal": lambda: dist.all_reduce(tensor, group=group),
        "torch.distributed, shoal, broadcast": lambda: dist.broadcast(tensor, 0, group=group),
        "group.allreduce of shoal": lambda: group.allreduce([tensor], opts),
        "nothing": lambda: None,
    }
    if group._native_calls is not None:
        calls["steps of shoal in C"] = _steps(group, tensor)
    for name, kind in (("Open MPI", OpenMpi), ("DeepSpeed", DeepSpeed)):
        try:
            reduce = kind(SIZE_BYTES).reduce
        except ImportError:
            continue
        over = OverMpi(rank, size, reduce)
        calls[f"{name}, called directly"] = lambda reduce=reduce: reduce(tensor)
        calls[f"torch.distributed, over {name}"] = lambda over=over: dist.all_reduce(
            tensor, group=over
        )
    return calls


def _steps(group: ShoalGroup, tensor: Tensor) -> Call:
    """The steps alone: the copy into the slot, the word, the wait and the sum."""
    board, native = group._board, group._native_calls
    assert native is not None
    advance, address, word = native.small.advance, tensor.data_ptr(), board.word

    def call() -> None:
        board.resync_phase()
        first, step = board.phase + 1, 0
        while step >= 0:
            step = advance(address, SIZE_BYTES, 0, word, first, step)

    return call


def _measure(part: Path, seconds: float) -> None:
    be_a_rank()
    tensor, chance = torch.zeros(SIZE_BYTES // 4), random.Random(0)
    calls = _variants(tensor)
    for call in calls.values():
        for _ in range(BATCH):
            call()
    fastest_us = dict.fromkeys(calls, float("inf"))
    goes_on, end_s = torch.ones(1), time.monotonic() + seconds
    meet = calls["torch.distributed, shoal"]
    while goes_on.item():
        for name in [name for _ in range(20) for name in chance.sample([*calls], len(calls))]:
            meet()
            call, begin = calls[name], time.perf_counter_ns()
            for _ in range(BATCH):
                call()
            taken_us = (time.perf_counter_ns() - begin) / BATCH / 1e3
            fastest_us[name] = min(fastest_us[name], taken_us)
        goes_on.fill_(time.monotonic() < end_s)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        part.write_text(json.dumps({name: {"fastest": us} for name, us in fastest_us.items()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
