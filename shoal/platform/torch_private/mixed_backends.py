"""Backends of other devices beside a process group that is written in Python."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from shoal.platform.torch_private.c10d import make_gloo

BACKEND_TYPES = dist.ProcessGroup.BackendType


def configured_backends() -> dict[str, str]:
    """Return the backend of each device, while torch makes a group.

    Why: torch makes no other backend of a group once one of them is a group in Python, and does not
    tell that one its configuration ("cpu:shoal,cuda:nccl"). Without: the group would have no NCCL.
    Checked: 2.11, 2.13, 2.15.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    config = frame.f_locals.get("backend_config") if frame is not None else None
    return {} if config is None else {d: str(b) for d, b in config.device_backend_map.items()}


def add_other_backends(
    group: dist.ProcessGroup,
    backends: dict[str, str],
    options: Any,
    backend_options: Any,
    timeout: timedelta,
) -> None:
    """Make the backends of other devices, as torch does, and register them with `group`.

    Args:
        backends: by device.
        options: torch's options for a backend of its plug-ins: store, ranks and timeout.
        backend_options: as given to `init_process_group`; those of NCCL, if any.

    Why, without and checked: as `configured_backends`.
    """
    made: dict[str, Any] = {}
    for device, name in backends.items():
        kind = distributed_c10d.Backend.backend_type_map.get(name, BACKEND_TYPES.CUSTOM)
        if name not in made:
            store = PrefixStore(f"{device}/", options.store)
            made[name] = _make(name, store, options, backend_options, timeout)
        group._register_backend(torch.device(device), kind, made[name])


def _make(name: str, store: Any, options: Any, backend_options: Any, timeout: timedelta) -> Any:
    rank, size = options.group_rank, options.group_size
    if name == "gloo":
        return make_gloo(store, rank, size, timeout)
    if name == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        chosen = backend_options or nccl.Options()
        chosen._timeout = timeout
        chosen.global_ranks_in_group = options.global_ranks_in_group
        chosen.group_name = options.group_id
        backend = nccl(store, rank, size, chosen)
        backend._set_sequence_number_for_group()
        return backend
    plugin = distributed_c10d.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    inner = distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    inner.store, inner.group_rank, inner.group_size = store, rank, size
    inner.timeout, inner.group_id = timeout, options.group_id
    inner.global_ranks_in_group = options.global_ranks_in_group
    return plugin.creator_fn(inner, backend_options)
