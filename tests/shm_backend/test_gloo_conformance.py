"""Random programs on the backend "shoal" and on Gloo: dtypes, calls, layouts, modes and errors."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.shm_backend.group import ShoalGroup
from shoal.testing import world

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
LENGTHS = (0, 1, 7, 64, 5_000, 140_000)
KINDS = ("all_reduce", "broadcast", "reduce", "all_gather", "scatter", "gather", "reduce_scatter")
GLOOS = ("reduce", "scatter", "gather")  # what Gloo makes also in a group of backend "shoal"
WRONG = ("a root", "a list", "a length")
SEEDS = [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_come_to_what_they_come_to_on_gloo(seed: int) -> None:
    world.run(2 + seed % 3, _compare, seed)


def _compare(seed: int) -> None:
    groups = (dist.group.WORLD, dist.new_group(backend="gloo"))
    ours, gloos = (_run(group, random.Random(seed)) for group in groups)
    for step, (own, other) in enumerate(zip(ours, gloos, strict=True)):
        assert own[0] == other[0], (step, own[0], other[0])
        for left, right in zip(own[1], other[1], strict=True):
            torch.testing.assert_close(left, right, rtol=_tolerance(left.dtype), atol=1e-5)


def _tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative difference of two orders of the same positive terms.

    Each order rounds once less than there are ranks, by half of the precision at most.
    """
    return torch.finfo(dtype).eps * dist.get_world_size() if dtype.is_floating_point else 0.0


def _run(group: Any, chance: random.Random) -> list[tuple[str, list[Tensor]]]:
    """Make 25 random calls; return the name and the results of each."""
    results, works = [], []
    for _ in range(25):
        if chance.random() < 0.1:
            results.append((_call_wrongly(group, chance), []))
            continue
        with torch.inference_mode(chance.random() < 0.3):
            kind = chance.choice(KINDS)
            work, outputs = _call(group, chance, kind)
            works.append(work)
            results.append((kind, outputs))
            if chance.random() < 0.4:
                _wait_for_all(works)
    _wait_for_all(works)
    return [(kind, [output.clone() for output in outputs]) for kind, outputs in results]


def _wait_for_all(works: list[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
    works.clear()


def _call(group: Any, chance: random.Random, kind: str) -> tuple[Any, list[Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype, op, later = chance.choice(DTYPES), chance.choice(OPS), chance.random() < 0.5
    length, root = chance.choice(LENGTHS), chance.randrange(size)
    if kind == "reduce_scatter" and dtype in (torch.float16, torch.uint8):
        dtype = torch.float32  # torch 2.13's Gloo has sums in other orders there
    values = torch.Generator().manual_seed(chance.randrange(2**30) * 8 + rank)
    made = [_numbers(values, length, dtype) for _ in range(size)]
    by_gloo = kind in GLOOS or torch.is_inference_mode_enabled()
    takes_gaps = not by_gloo and isinstance(group, ShoalGroup)
    tensor = _laid_out(chance, made[0], takes_gaps)
    rows = [_laid_out(chance, torch.zeros_like(one), takes_gaps) for one in made]
    if kind == "all_reduce":
        return dist.all_reduce(tensor, op, group=group, async_op=later), [tensor]
    if kind == "broadcast":
        return dist.broadcast(tensor, src=root, group=group, async_op=later), [tensor]
    if kind == "reduce":
        work = dist.reduce(tensor, root, op, group=group, async_op=later)
        return work, [tensor] if rank == root else []
    if kind == "all_gather":
        return dist.all_gather(rows, tensor, group=group, async_op=later), rows
    if kind == "scatter":
        sent = made if rank == root else None
        return dist.scatter(rows[0], sent, src=root, group=group, async_op=later), rows[:1]
    if kind == "gather":
        into = rows if rank == root else None
        return dist.gather(tensor, into, dst=root, group=group, async_op=later), into or []
    return dist.reduce_scatter(rows[0], made, op, group=group, async_op=later), rows[:1]


def _numbers(values: torch.Generator, length: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return (torch.rand(length, generator=values) + 0.5).to(dtype)
    return torch.randint(0, 3, (length,), generator=values).to(dtype)


def _laid_out(chance: random.Random, tensor: Tensor, takes_gaps: bool) -> Tensor:
    """Return a view with gaps now and then. Gloo refuses them, so it gets the tensor itself."""
    with_gaps = chance.random() < 0.3
    if not with_gaps or not takes_gaps:
        return tensor
    wide = torch.zeros(len(tensor), 3, dtype=tensor.dtype)
    wide[:, 1] = tensor
    return wide[:, 1]


def _call_wrongly(group: Any, chance: random.Random) -> str:
    """Make a call with a wrong argument, the same on all ranks; return what was wrong."""
    wrong, tensor = chance.choice(WRONG), torch.ones(4)
    rows = [tensor.clone() for _ in range(dist.get_world_size())]
    call = {
        "a root": lambda: group.broadcast(tensor, len(rows)),
        "a list": lambda: group.allgather([[*rows, tensor]], [tensor]),
        "a length": lambda: group.allgather([[row[:3] for row in rows]], [tensor]),
    }[wrong]
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        call()
    return wrong
