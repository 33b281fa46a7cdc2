"""Calls of a group's own methods, in all forms that torch has, and the checks of their arguments.

Every program runs on backend "shoal" and on Gloo, with the same results and kinds of errors."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.platform.torch_private.c10d import Options
from shoal.testing import world

MINUTE = timedelta(minutes=1)
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
Program = Callable[[Any, Tensor, list[Tensor], int], Any]

# group, a tensor, a row for each rank, this rank -> handle
FORMS: dict[str, Program] = {
    "allreduce(tensor)": lambda g, t, rows, r: g.allreduce(t),
    "allreduce(tensor, op, timeout)": lambda g, t, rows, r: g.allreduce(t, SUM, MINUTE),
    "allreduce(tensor=)": lambda g, t, rows, r: g.allreduce(tensor=t, op=MAX, timeout=MINUTE),
    "allreduce(opts=)": lambda g, t, rows, r: g.allreduce([t], opts=Options.AllreduceOptions()),
    "broadcast(tensor, root=)": lambda g, t, rows, r: g.broadcast(t, root=1, timeout=MINUTE),
    "reduce(tensor, root, op)": lambda g, t, rows, r: g.reduce(t, 1, MAX),
    "allgather(rows, tensor)": lambda g, t, rows, r: g.allgather(rows, t),
    "gather(rows, tensor, root)": lambda g, t, rows, r: g.gather([] if r else rows, t, 0),
    "scatter(tensor, rows, root)": lambda g, t, rows, r: g.scatter(t, [] if r else rows, 0),
    "reduce_scatter(out, rows, op)": lambda g, t, rows, r: g.reduce_scatter(t, rows, MAX),
    "alltoall_base": lambda g, t, rows, r: g.alltoall_base(t, t + 5, [], []),
    "barrier(timeout)": lambda g, t, rows, r: g.barrier(timeout=MINUTE),
    "monitored_barrier": lambda g, t, rows, r: g.monitored_barrier(MINUTE),
}

WRONG: dict[str, Program] = {
    "no tensor": lambda g, t, rows, r: g.allreduce([]),
    "a root beyond the group": lambda g, t, rows, r: g.broadcast(t, 9),
    "a negative root": lambda g, t, rows, r: g.reduce(t, -1),
    "a gather into too few": lambda g, t, rows, r: g.gather(rows[:1], t, r),
    "a gather into other lengths": lambda g, t, rows, r: g.gather([t[:1], t[:1]], t, r),
    "a gather into rows without being the root": lambda g, t, rows, r: g.gather(rows, t, 1 - r),
    "a scatter of too few": lambda g, t, rows, r: g.scatter(t, rows[:1], r),
    "a scatter of another type": lambda g, t, rows, r: g.scatter(t, [a.int() for a in rows], r),
    "an all-gather into another type": lambda g, t, rows, r: g.allgather(
        [a.double() for a in rows], t
    ),
    "an all-gather of two": lambda g, t, rows, r: g.allgather([rows], [t, t]),
    "a reduce-scatter of too few": lambda g, t, rows, r: g.reduce_scatter(t, rows[:1]),
    "an unknown argument": lambda g, t, rows, r: g.allreduce(t, root=1),
    "a mean of whole numbers": lambda g, t, rows, r: g.allreduce(t.int(), dist.ReduceOp.AVG),
    "bits of floats": lambda g, t, rows, r: g.allreduce(t, dist.ReduceOp.BAND),
}


def test_every_form_of_a_call_comes_to_what_it_comes_to_on_gloo() -> None:
    assert world.run(2, _compare_forms) == [len(FORMS)] * 2


def _compare_forms() -> int:
    results: list[list[list[float]]] = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        results.append([])
        for form in FORMS.values():
            tensor = torch.arange(4.0) + 10 * dist.get_rank()
            rows = [torch.arange(4.0) + 100 * row for row in range(2)]
            work = form(group, tensor, rows, dist.get_rank())
            if work is not None:
                work.wait()
            if form is FORMS["reduce(tensor, root, op)"] and dist.get_rank() == 0:
                tensor.zero_()  # Gloo leaves intermediate values outside the root
            results[-1].append([*tensor.tolist(), *torch.cat(rows).tolist()])
    for name, ours, gloos in zip(FORMS, *results, strict=True):
        assert ours == gloos, name
    return len(results[0])


def test_wrong_arguments_are_an_error_as_on_gloo_and_the_group_stays_open() -> None:
    assert world.run(2, _call_wrongly) == [2.0, 2.0]


def _call_wrongly() -> float:
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    rank, rows = dist.get_rank(), [torch.zeros(4), torch.zeros(4)]
    for name, program in WRONG.items():
        for group in (gloo, ours):
            try:
                program(group, torch.ones(4), rows, rank).wait()
            except (RuntimeError, ValueError, TypeError):
                continue
            raise AssertionError(f"{name} was accepted by {group}")
    dist.all_reduce(tensor := torch.ones(2))
    return tensor[0].item()


def test_a_rank_of_one_takes_what_two_take() -> None:
    assert world.run(1, _call_all_alone) == [True]


def _call_all_alone() -> bool:
    for dtype in (torch.float32, torch.int32, torch.uint8):
        tensor = torch.ones(6, dtype=torch.uint8).to(dtype)
        expected = tensor.clone()
        dist.all_reduce(tensor)
        dist.all_reduce(tensor.view(2, 3).t())
        dist.broadcast(tensor, src=0)
        dist.reduce(tensor, dst=0)
        rows = [torch.zeros_like(tensor)]
        dist.all_gather(rows, tensor)
        assert torch.equal(rows[0].view(torch.uint8), expected.view(torch.uint8))
        dist.gather(tensor, rows, dst=0)
        dist.scatter(tensor, rows, src=0)
        dist.reduce_scatter(tensor, rows)
        out = torch.zeros_like(tensor)
        dist.all_to_all_single(out, tensor)
        dist.barrier()
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    return True
