"""Checks of private names about backends of a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shoal.platform.torch_private import mixed_backends
from shoal.platform.torch_private.c10d import (
    backend_for,
    num_collectives,
    timeout_of,
)
from shoal.testing import world

CPU, CUDA, XPU = torch.device("cpu"), torch.device("cuda"), torch.device("xpu")
FIRST, SECOND = timedelta(seconds=77), timedelta(seconds=33)


def _timeout_of() -> bool:
    found = []
    for backend in ("gloo", "shoal"):
        group = dist.new_group(backend=backend, timeout=FIRST)
        gloo = backend_for(group, CPU)
        before = timeout_of(gloo)
        _set_pg_timeout(SECOND, group)
        found.append((before, timeout_of(gloo)))
    return found == [(FIRST, SECOND)] * 2


def _backend_types(kinds: Any) -> bool:
    of_names = dist.Backend.backend_type_map
    known = of_names["gloo"] == kinds.GLOO and of_names["nccl"] == kinds.NCCL
    return known and of_names["shoal"] == kinds.CUSTOM


def _configured_backends() -> bool:
    seen = []

    def create(options: Any, _: Any) -> dist.ProcessGroup:
        seen.append(mixed_backends.configured_backends())
        return dist.ProcessGroup(options.group_rank, options.group_size)

    dist.Backend.register_backend("looking", create, extended_api=True, devices=["cpu"])
    dist.new_group(backend="cpu:looking,cuda:gloo")
    return seen == [{"cpu": "looking", "cuda": "gloo"}] and not mixed_backends.configured_backends()


def _adds_other_backends() -> bool:
    """One backend carries what is on two devices, here tensors of the CPU, and none of "shoal"."""
    made = []

    def create(options: Any, _: Any) -> Any:
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        made.append(gloo)
        return gloo

    dist.Backend.register_backend("other", create, extended_api=True, devices=["cuda", "xpu"])
    group = dist.new_group(backend="cpu:shoal,cuda:other,xpu:other")
    found = [backend_for(group, device) is made[0] for device in (CPU, CUDA, XPU)]
    made[0].allreduce([tensor := torch.ones(1)]).wait()
    return len(made) == 1 and found == [False, True, True] and tensor.item() == 2.0


def _makes_each_kind() -> bool:
    plain: list[Any] = []
    extended: list[Any] = []
    made, chosen = object(), object()
    register = dist.Backend.register_backend
    register("plain", lambda *args: plain.extend(args) or made, devices=["cpu"])
    register("extended", lambda *args: extended.extend(args) or made, True, ["cpu"])
    store = dist.HashStore()
    options = SimpleNamespace(
        group_rank=0, group_size=1, group_id="ours", global_ranks_in_group=[3]
    )

    def make(name: str) -> Any:
        return mixed_backends._make(name, store, options, chosen, FIRST)

    gloo = make("gloo")
    is_gloo = isinstance(gloo, dist.ProcessGroupGloo) and timeout_of(gloo) == FIRST
    same = make("plain") is made and make("extended") is made
    given = extended[0]
    told = given.store, given.group_rank, given.group_size, given.timeout, given.group_id
    all_told = told == (store, 0, 1, FIRST, "ours") and given.global_ranks_in_group == [3]
    return is_gloo and same and plain == [store, 0, 1, FIRST] and all_told and extended[1] is chosen


def _counts_messages() -> bool:
    """The default group here is Shoal's, which does not count; then the sum says so."""
    group = dist.new_group(backend="gloo")
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2), group=group)
    counted = group._get_sequence_number_for_group() == before + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.platform.torch_private.c10d.process_groups", lambda: [group])
        return counted and num_collectives() == before + 1


def _over(ranks: int, function: Callable[[], bool]) -> Callable[[Any], bool]:
    return lambda _: all(world.run(ranks, function))


CHECKS: dict[str, Callable[[Any], bool]] = {
    "c10d.num_collectives": _over(2, _counts_messages),
    "c10d.timeout_of": _over(1, _timeout_of),
    "mixed_backends.BACKEND_TYPES": _backend_types,
    "mixed_backends.configured_backends": _over(2, _configured_backends),
    "mixed_backends.add_other_backends": _over(2, _adds_other_backends),
    "mixed_backends._make": _over(1, _makes_each_kind),
}
