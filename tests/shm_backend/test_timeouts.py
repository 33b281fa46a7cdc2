"""Timeouts that are set after a group was made, and those of single calls."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shoal.errors import CollectiveFailed
from shoal.platform.torch_private.c10d import Options
from shoal.testing import world

SHORT = timedelta(seconds=0.4)


def test_a_call_ends_at_the_timeout_that_was_set_last_or_at_its_own() -> None:
    assert world.run(2, _wait_in_vain) == [["waited 0.4 s"] * 4, []]


def _wait_in_vain() -> list[str]:
    groups = [dist.new_group(timeout=timedelta(minutes=10)) for _ in range(4)]
    said = []
    if dist.get_rank() == 0:
        _set_pg_timeout(SHORT, groups[0])
        said.append(_error(lambda: dist.all_reduce(torch.ones(2), group=groups[0])))
        groups[1].set_timeout(SHORT)
        said.append(_error(lambda: dist.barrier(group=groups[1])))
        options = Options.BroadcastOptions()
        options.rootRank, options.timeout, options.asyncOp = 1, SHORT, False
        said.append(_error(lambda: groups[2].broadcast([torch.ones(2)], options).wait()))
        reduction = Options.AllreduceOptions()
        reduction.timeout = SHORT  # the thread of the group waits for this one
        said.append(_error(lambda: groups[3].allreduce([torch.ones(2)], reduction).wait()))
    dist.barrier()
    return said


def _error(call: object) -> str:
    assert callable(call)
    with pytest.raises(CollectiveFailed) as caught:
        call()
    text = str(caught.value)
    assert "rank 1" in text
    return text[text.index("waited") :][:12]
