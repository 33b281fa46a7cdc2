"""Process groups, their stores and DistributedDataParallel's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import GradBucket as _GradBucket
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

# Why: torch.distributed.GradBucket is this class, and torch's type stubs leave it out. Without: an
# error of mypy at each hook of a bucket, whose annotation DistributedDataParallel compares with the
# class. Checked: 2.11, 2.13, 2.15.
GradBucket = _GradBucket

# Why: a backend makes options of every collective, and torch.distributed has names for some only.
# Any: the stubs leave out the same ones. Without: no collective could be handed on to Gloo.
# Checked: 2.11, 2.13, 2.15.
Options: Any = _distributed_c10d

# Why: Gloo gathers into one flat tensor, and scatters the sum of one, under these names only; torch
# 2.13 has public ones for a group and none for its backends. Without: neither could be handed on to
# Gloo. Checked: 2.11, 2.13, 2.15.
ALL_GATHER_FLAT = "_allgather_base"
REDUCE_SCATTER_FLAT = "_reduce_scatter_base"


def default_store() -> Store:
    """Return the store that the default process group met in.

    Why: `init_process_group` may have made it itself, and nothing gives it back. Without: ranks
    could not tell each other which of them failed first. Checked: 2.11, 2.13, 2.15.
    """
    store: Store = distributed_c10d._get_default_store()
    return store


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return a Gloo that listens at SHOAL_ADDRESS, where the launcher has set that variable.

    Why: torch offers a choice by the name of an interface (GLOO_SOCKET_IFNAME), which may have
    several addresses, of which Gloo takes the first. Without: ranks of several hosts might not
    reach each other. Checked: 2.11, 2.13, 2.15.
    """
    address = os.environ.get("SHOAL_ADDRESS")
    if not address:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    made: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return made


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups that this process is in, in the order in which they were made.

    Why: torch has no list of them. Without: a trace would miss collectives of groups that others
    have made, and a rank might never end (pytorch#56297). Checked: 2.11, 2.13, 2.15.
    """
    return list(distributed_c10d._world.pg_map)


def num_collectives() -> int:
    """Return how many messages this rank has begun, in all groups; -1 where one does not count.

    Why: a group counts its messages to tell ranks that are out of step, and gives the count under
    this name only. Without: ranks that compute the same samples side by side could not be told
    from those of a tensor group. Checked: 2.11, 2.13, 2.15.
    """
    groups: list[Any] = [*process_groups()]  # torch's stubs leave the name out
    try:
        return sum(group._get_sequence_number_for_group() for group in groups)
    except RuntimeError:
        return -1


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what carries a group's tensors on `device`.

    Why: `torch.distributed.get_backend` gives a name, and one group may have several backends.
    Without: nothing could be handed on to Gloo, and nobody could tell that Gloo carries a tensor.
    Checked: 2.11, 2.13, 2.15.
    """
    return group._get_backend(device)


def timeout_of(backend: Any) -> timedelta:
    """Return the present timeout of a Gloo backend.

    Why: torch changes the timeout of a group's Gloo backend alone (`_set_pg_timeout`). Without:
    calls in shared memory would keep the timeout that the group was made with. Checked: 2.11,
    2.13, 2.15.
    """
    limit: timedelta = backend.options._timeout
    return limit


def add_backend(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Let `backend`, of a BackendType, carry a group's tensors on `device`, and what has no device.

    Why: torch asks a group for the backend of a device and for the default one, and a group that
    is written in Python has neither. Without: torch finds no Gloo in it, and barriers and buffers
    fail. Checked: 2.11, 2.13, 2.15.
    """
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)


def check_reducer_finalized(engine: DistributedDataParallel) -> None:
    """Raise RuntimeError where the last backward pass left a bucket that was not reduced.

    It names the numbers of the parameters without a gradient.

    Why: the engine asks the same at the beginning of the next forward pass. Without: a step would
    be taken with gradients that are not averaged. Checked: 2.11, 2.13, 2.15.
    """
    engine._check_reducer_finalized()


def replace_rendezvous(
    scheme: str, make: Callable[[Callable[..., Iterator[Any]]], Callable[..., Iterator[Any]]]
) -> None:
    """Replace the function by which ranks meet at URLs of a scheme by what `make` returns for it.

    The function takes a URL that holds rank and world size, and the keyword `timeout`. It yields
    a store, the rank and the world size, once.

    Why: `register_rendezvous_handler` refuses a scheme that has a function. Without: ranks of a
    launched script that names an address of its own wait for half an hour, without an error.
    Checked: 2.11, 2.13, 2.15.
    """
    module = import_module("torch.distributed.rendezvous")  # a function has its name
    module._rendezvous_handlers[scheme] = make(module._rendezvous_handlers[scheme])
