"""Checks of private names about backends of a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shoal.platform.torch_private.c10d import backend_for, num_collectives, timeout_of
from shoal.testing import world

CPU = torch.device("cpu")
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
}
