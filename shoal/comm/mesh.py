"""The mesh: the axes, process groups and device of this rank.

This file makes and closes the default process group."""

from __future__ import annotations

import atexit
import gc
import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.axis import Axis, new_group
from shoal.comm.parallel_dims import ParallelDims, groups_along, problems
from shoal.errors import EnvironmentConflict, StrategyRefused
from shoal.launch.environment import RankInfo
from shoal.launch.helper_spawner import HelperSpawner
from shoal.platform.interfaces import route_interface
from shoal.platform.sockets import wait_for_address
from shoal.trace.recorder import Recorder
from shoal.watchdog.progress_writer import own_progress

TIMEOUT = timedelta(minutes=30)
NAME_WAIT_S = 60.0
"""Seconds in which the name of rank 0's machine may get an address here."""
TIMEOUT_LIMITS = 20
"""The launcher's limit is ten times longer in a first step; twice that is left to it."""
GPU_BACKENDS = "cpu:gloo,cuda:nccl"
"""The backends of a world with GPUs. torch makes no second backend beside one that is written in
Python, such as `shoal`, so it has Gloo for the CPU.
"""


# Objects that keep a process group alive until they are closed. One that is gone needs no cleanup.
_cleanups: WeakSet[Any] = WeakSet()


class Axes(NamedTuple):
    """The axes of a world with pipeline or tensor parallelism."""

    pipeline: Axis
    data: Axis
    tensor: Axis


@dataclass(frozen=True, kw_only=True)
class Mesh(Axis):
    """All ranks, and their three axes: see `shoal.comm.parallel_dims`.

    The batch is divided along `data`. Ranks of one pipeline and of one tensor group get the same
    samples. The mesh itself is the axis of all ranks."""

    place: RankInfo
    helper_spawner: HelperSpawner | None = None
    """Starts helper processes. On local rank 0 of each machine, if a strategy needs them."""
    degrees: ParallelDims = field(default_factory=ParallelDims)
    recorder: Recorder = field(default_factory=Recorder, compare=False)
    """Records the work of strategies while a trace is taken."""
    axes: Axes | None = None
    """None if there is only the data axis, which then is the world."""

    def divided(self, degrees: ParallelDims, helpers: bool) -> Mesh:
        """Return a mesh of the same ranks with axes of other sizes. Collective.

        Args: helpers: False to end what starts helper processes.
        """
        _check_sizes(self.place, degrees)
        if self.helper_spawner is not None and not helpers:
            self.helper_spawner.close()
        data, axes = degrees.data(self.size), None
        if data < self.size:
            axes = Axes(
                pipeline=_axis(self, degrees.pipeline, data * degrees.tensor),
                data=_axis(self, data, degrees.tensor),
                tensor=_axis(self, degrees.tensor, 1),
            )
        spawner = self.helper_spawner if helpers else None
        return replace(self, helper_spawner=spawner, degrees=degrees, axes=axes)

    @property
    def data(self) -> Axis:
        return self if self.axes is None else self.axes.data

    @cached_property
    def tensor(self) -> Axis:
        return Axis(0, 1, self.device) if self.axes is None else self.axes.tensor

    @cached_property
    def pipeline(self) -> Axis:
        return Axis(0, 1, self.device) if self.axes is None else self.axes.pipeline

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The `DeviceMesh` of torch for `fully_shard` and DTensor. The first access is collective.

        Its dimensions are "pipeline", "replicate", "shard" and "tensor". Dimensions of one rank are
        left out, except "shard". "replicate" x "shard" is the data axis. There is only one such
        mesh, because torch cannot combine dimensions of several."""
        shard = self.degrees.dp_shard or self.data.size
        sizes = {
            "pipeline": self.pipeline.size,
            "replicate": self.data.size // shard,
            "shard": shard,
            "tensor": self.tensor.size,
        }
        groups: dict[str, dist.ProcessGroup] = {}
        stride = self.size
        for name, size in sizes.items():
            stride //= size
            if size == 1 and name != "shard":
                continue
            # torch's engines on the data axis get new groups, so that their collectives cannot mix
            # with those of Shoal.
            axis = {"pipeline": self.pipeline, "tensor": self.tensor}.get(name)
            if axis is None:
                groups[name] = new_group(groups_along(self.size, size, stride))
            else:
                group = axis.group or dist.group.WORLD
                assert group is not None
                groups[name] = group
        shape = [sizes[name] for name in groups]
        ranks = torch.arange(self.size).view(shape)
        return DeviceMesh.from_group(
            [*groups.values()], self.device.type, ranks, mesh_dim_names=tuple(groups)
        )


def init_mesh(place: RankInfo, helpers: bool, degrees: ParallelDims) -> Mesh:
    """Make the process groups of this rank. Collective, except in a world of one.

    If the program has made the default process group itself, that one is used.

    Args:
        place: this rank in the world, as the launcher's variables say.
        helpers: True if a strategy needs helper processes.
        degrees: the sizes of the axes.

    Raises:
        EnvironmentConflict: the program's group and the launcher's variables differ.
        StrategyRefused: the world cannot have these sizes.
    """
    _check_sizes(place, degrees)
    _check_own_group(place)
    # The spawner forks, so it must come before there are threads and connections.
    spawner = HelperSpawner() if helpers and place.local_rank == 0 else None
    device = _device(place)
    if place.world > 1 and not dist.is_initialized():
        backend = GPU_BACKENDS if device.type == "cuda" else "cpu:shoal"
        # So long that the launcher, whose limit this is, speaks before every rank does.
        timeout = timedelta(seconds=TIMEOUT_LIMITS * own_progress().hang_limit_s)
        join_world(place, backend, max(TIMEOUT, timeout))
        # A group that is open while the interpreter shuts down can end a good run with an error.
        atexit.register(shutdown)
    mesh = Mesh(place.rank, place.world, device, place=place, helper_spawner=spawner)
    return mesh.divided(degrees, helpers)


def register_cleanup(holder: Any) -> None:
    """Close `holder` before the process group is closed, or with the process where none is."""
    _cleanups.add(holder)


@atexit.register
def _close_holders() -> None:
    for holder in list(_cleanups):
        holder.close()
    _cleanups.clear()


def ensure_group(device: torch.device) -> None:
    """Make a process group for a world of one, because torch's engines need one in any world.

    Args: device: of this rank.
    """
    if not dist.is_initialized():
        # torch documents HashStore, but its stubs leave it out.
        store = dist.HashStore()  # type: ignore[attr-defined]
        backend = GPU_BACKENDS if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        atexit.register(shutdown)


def shutdown() -> None:
    """Close the process group, if there is one.

    No reference to the group may remain. Its threads may still have to free Python objects, which
    ends the process with SIGABRT once the interpreter shuts down (two runs in fifteen under
    torchrun, with torch 2.13)."""
    _close_holders()
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _check_own_group(place: RankInfo) -> None:
    """Raise EnvironmentConflict if the program's process group differs from the environment."""
    if not dist.is_initialized():
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    if (rank, world) != (place.rank, place.world):
        raise EnvironmentConflict(
            f"the program's own process group says rank {rank} of {world}, the environment "
            f"{place.describe()}. Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for it, or "
            "let shoal.init() make the group."
        )


def join_world(place: RankInfo, backend: str, timeout: timedelta) -> None:
    """Make the default process group. Collective.

    Ranks of Shoal's own launcher meet in a store that only their user can open, all others in the
    TCPStore at MASTER_ADDR.

    Raises: EnvironmentConflict: the name of rank 0's machine has no address here.
    """
    store = None
    if place.store is not None:
        # torch documents FileStore, but its stubs leave it out.
        store = dist.FileStore(place.store)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
    elif place.master_address is not None:
        try:
            wait_for_address(place.master_address, NAME_WAIT_S)
        except OSError as error:
            raise EnvironmentConflict(
                f"this machine knows no address of {place.master_address}, where rank 0 is to be "
                f"met ({error.strerror}). Set MASTER_ADDR to an address of rank 0's machine: under "
                f"Slurm, NodeAddr of `scontrol show node {place.master_address}`."
            ) from None
        os.environ["MASTER_ADDR"] = place.master_address
        os.environ["MASTER_PORT"] = str(place.master_port)
        if place.local_world < place.world and "GLOO_SOCKET_IFNAME" not in os.environ:
            # Gloo takes the address of the machine's own name, which Debian writes as 127.0.1.1.
            interface = route_interface(place.master_address)
            os.environ |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout
    )


def _check_sizes(place: RankInfo, degrees: ParallelDims) -> None:
    """Raise StrategyRefused if the world cannot have these sizes."""
    sentences = problems(degrees, place.world, place.local_world)
    if not sentences and place.rank % degrees.tensor != place.local_rank % degrees.tensor:
        sentences = [
            f"tensor={degrees.tensor}: tensor groups lie inside one machine, but rank {place.rank} "
            f"is number {place.local_rank} on its machine: ranks go round the machines. Start them "
            "in blocks, under srun with --distribution=block."
        ]
    if sentences:
        raise StrategyRefused("\n".join(sentences))


def _axis(world: Axis, size: int, stride: int) -> Axis:
    """Make an axis. Collective."""
    all_groups = groups_along(world.size, size, stride)
    # An axis of one rank needs no group, and that of all ranks uses the default group.
    group = new_group(all_groups) if 1 < size < world.size else None
    return Axis(world.rank // stride % size, size, world.device, all_groups, group)


def _device(place: RankInfo) -> torch.device:
    """Return this rank's GPU if there are enough for all local ranks, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Slurm and MPI can bind each rank to one GPU, which is then the only one that it sees.
    bound = count == 1 and place.launcher in ("slurm", "mpi")
    if not bound and count < place.local_world:
        return torch.device("cpu")
    device = torch.device("cuda", 0 if bound else place.local_rank)
    torch.cuda.set_device(device)
    return device
