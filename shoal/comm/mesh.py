"""The one owner of process groups: this rank's place in the world and along its axes, its
device, and how to leave.
"""

from __future__ import annotations

import atexit
import gc
import os
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.axis import Axis, new_group
from shoal.comm.parallel_dims import ParallelDims, groups_along, problems
from shoal.errors import EnvironmentConflict, StrategyRefused
from shoal.launch.environment import RankInfo
from shoal.launch.helper_spawner import HelperSpawner
from shoal.trace.recorder import Recorder

TIMEOUT = timedelta(minutes=30)


class Closeable(Protocol):
    """What keeps a process group alive, until it is told to let go."""

    def close(self) -> None: ...


_cleanups: WeakSet[Closeable] = WeakSet()


class Axes(NamedTuple):
    """The axes of a world that is cut."""

    pipeline: Axis
    data: Axis
    tensor: Axis


@dataclass(frozen=True, kw_only=True)
class Mesh(Axis):
    """All ranks, and the three axes that they stand along: see `shoal.comm.parallel_dims`.

    The batch is shared out along `data`; ranks of one pipeline and of one tensor group see the same
    samples. What everyone takes part in, the Mesh does itself."""

    place: RankInfo
    helper_spawner: HelperSpawner | None = None
    """On one rank of each machine, where a strategy has asked for it: starts helper processes."""
    degrees: ParallelDims = field(default_factory=ParallelDims)
    recorder: Recorder = field(default_factory=Recorder, compare=False)
    """Told by strategies what they do when, while a trace is taken."""
    axes: Axes | None = None
    """None where there is the data axis alone: it is the world, with no group of its own."""

    @property
    def data(self) -> Axis:
        return self if self.axes is None else self.axes.data

    @property
    def tensor(self) -> Axis:
        return Axis(0, 1, self.device) if self.axes is None else self.axes.tensor

    @property
    def pipeline(self) -> Axis:
        return Axis(0, 1, self.device) if self.axes is None else self.axes.pipeline

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """torch's own mesh, from which `fully_shard` and DTensor take theirs. Its first use is
        collective.

        Its dimensions are "pipeline", "replicate", "shard" and "tensor"; all but "shard" are left
        out where they have one rank. "replicate" x "shard" is the data axis. There is one mesh, for
        torch composes dimensions of one only."""
        shard = self.degrees.shard or self.data.size
        sizes = {
            "pipeline": self.pipeline.size,
            "replicate": self.data.size // shard,
            "shard": shard,
        }
        sizes["tensor"] = self.tensor.size
        groups: dict[str, dist.ProcessGroup] = {}
        stride = self.size
        for name, size in sizes.items():
            stride //= size
            if size == 1 and name != "shard":
                continue
            # Engines of the data axis get groups of their own: what they send must not come between
            # other messages.
            own = {"pipeline": self.pipeline, "tensor": self.tensor}.get(name)
            groups[name] = (
                new_group(groups_along(self.size, size, stride))
                if own is None
                else own.group or _world_axis()
            )
        shape = [sizes[name] for name in groups]
        ranks = torch.arange(self.size).view(shape)
        return DeviceMesh.from_group(
            [*groups.values()], self.device.type, ranks, mesh_dim_names=tuple(groups)
        )


def init_mesh(place: RankInfo, helpers: bool, degrees: ParallelDims) -> Mesh:
    """Take this process's place in the world. Collective; a world of one talks to nobody.

    A process group that the program itself has set up is used as it is.

    Args:
        helpers: a strategy wants processes of its own beside the ranks.
        degrees: how the world is cut.

    Raises:
        EnvironmentConflict: that group is another world than the launcher's variables tell of.
        StrategyRefused: the world cannot be cut so.
    """
    _check_sizes(place, degrees)
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (
        place.rank,
        place.world,
    ):
        raise EnvironmentConflict(
            f"the program's own process group says rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, the environment "
            f"{place.describe()}. Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for it, or "
            "let shoal.init() "
            "make the group."
        )
    nursery = (
        HelperSpawner() if helpers and place.local_rank == 0 else None
    )  # before there are threads and connections
    device = _device(place)
    if place.world > 1 and not dist.is_initialized():
        if place.master_address is not None:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = (
                place.master_address,
                str(place.master_port),
            )
        # With a backend written in Python, torch makes no other one beside it.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:shoal"
        dist.init_process_group(backend, rank=place.rank, world_size=place.world, timeout=TIMEOUT)
        # A group that is still open while the interpreter goes down can end a good run with an
        # error.
        atexit.register(shutdown)
    axes = _axes(place, device, degrees) if degrees.data(place.world) < place.world else None
    return Mesh(
        rank=place.rank,
        size=place.world,
        device=device,
        place=place,
        helper_spawner=nursery,
        degrees=degrees,
        axes=axes,
    )


def register_cleanup(holder: Closeable) -> None:
    """Have `holder` closed before the process group is."""
    _cleanups.add(holder)


def ensure_group() -> None:
    """Make a process group for a world of one, for engines that need one in any world."""
    if not dist.is_initialized():
        # torch documents it, its stubs leave it out
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        atexit.register(shutdown)


def shutdown() -> None:
    """Close the process group, if there is one.

    It must not outlive this call: its threads may still have Python objects to give back, which
    ends the process with SIGABRT once the interpreter is going down (two runs in fifteen under
    torchrun, with torch 2.13)."""
    for holder in list(_cleanups):
        holder.close()
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _world_axis() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _check_sizes(place: RankInfo, degrees: ParallelDims) -> None:
    """Raise StrategyRefused where ranks cannot stand so."""
    found = problems(degrees, place.world, place.local_world)
    if not found and place.rank % degrees.tensor != place.local_rank % degrees.tensor:
        found = [
            f"tensor={degrees.tensor}: tensor groups lie inside one machine, but rank {place.rank} "
            "is number "
            f"{place.local_rank} on its machine: ranks go round the machines. Start them in "
            "blocks, under srun with "
            "--distribution=block."
        ]
    if found:
        raise StrategyRefused("\n".join(found))


def _axes(place: RankInfo, device: torch.device, degrees: ParallelDims) -> Axes:
    """The three axes of a world that is cut. Collective."""
    data = degrees.data(place.world)
    return Axes(
        pipeline=_axis(place, device, degrees.pipeline, data * degrees.tensor),
        data=_axis(place, device, data, degrees.tensor),
        tensor=_axis(place, device, degrees.tensor, 1),
    )


def _axis(place: RankInfo, device: torch.device, size: int, stride: int) -> Axis:
    all_lines = groups_along(place.world, size, stride)
    group = new_group(all_lines) if 1 < size < place.world else None
    return Axis(place.rank // stride % size, size, device, all_lines, group)


def _device(place: RankInfo) -> torch.device:
    """This rank's GPU where there are enough of them for all local ranks, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Slurm and MPI can bind each rank to a GPU of its own, which is then the only one that it sees.
    bound = count == 1 and place.launcher in ("slurm", "mpi")
    if not bound and count < place.local_world:
        return torch.device("cpu")
    device = torch.device("cuda", 0 if bound else place.local_rank)
    torch.cuda.set_device(device)
    return device
