"""Process groups that are given up, but not torn down before the process ends."""

from __future__ import annotations

import functools
from typing import Any

_kept: list[Any] = []


def keep_process_groups_alive() -> None:
    """From now on, let `destroy_process_group` leave the last reference to a group here. Safe to
    call again.

    When a DistributedDataParallel holds that last reference, torch (2.11 to 2.13) waits for Gloo's
    threads with the interpreter lock held, and one of them may be waiting for just that lock
    (pytorch#56297): the rank never ends. PyTorch's own tutorial met this in most of its runs on
    ranks that start as fast as ours."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    from shoal.platform.torch_private.c10d import process_groups

    destroy = distributed_c10d.destroy_process_group
    if not distributed.is_available() or hasattr(destroy, "__wrapped__"):
        return

    @functools.wraps(destroy)
    def leave(group: Any = None) -> None:
        _kept.extend(process_groups() if group is None else [group])
        destroy(group)

    distributed_c10d.destroy_process_group = distributed.destroy_process_group = leave
