"""One step's exchange of gradients: through Shoal's servers, or by Gloo's ring.

Each host holds the same parameters; the gradient of rank r is r + 1 everywhere and the learning
rate 1, so that the right values are known after any number of steps, and are checked.

Time to compute is slept, a third of it forward: nothing else is to be waited for than the links.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.costs.server_count import FORWARD
from shoal.launch.helper_spawner import HelperSpawner
from shoal.parameter_server.cluster_config import ClusterConfig, ShardSettings
from shoal.parameter_server.coordinator.coordinator import Address
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.launcher import CoordinatorProcess, ServerPool
from shoal.parameter_server.optimizer_spec import OptimizerSpec, recipe_of, settings_of
from shoal.parameter_server.partitioning import ParamMeta, Partition, assign, partition
from shoal.parameter_server.transport.key import read_key
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.socket_network import SocketNetwork
from shoal.platform.tensors import MIB

from .namespaces import address
from .worker_pool import answer, await_end

LIMIT = timedelta(seconds=120)
RENDEZVOUS_PORT = 29500
LEASE_S = 2.0


@dataclass(frozen=True)
class Work:
    """One measurement.

    Args:
        size_mib, part_mib: of the parameters, and of a part or bucket of them.
        steps: that are timed; one more comes before.
        compute_s: that a step's forward and backward pass take.
    """

    size_mib: int
    part_mib: float
    steps: int
    compute_s: float = 0.0

    @property
    def numbers(self) -> int:
        return self.size_mib * MIB // 4

    @property
    def parts(self) -> list[Partition]:
        return partition(
            {"weight": ParamMeta(self.numbers, torch.float32, 0)}, int(self.part_mib * MIB)
        )

    def model(self) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.zeros(self.numbers))
        return weight, torch.optim.SGD([weight], lr=1.0)


def new_job(work: Work, key_file: Path, workers: int, servers: int) -> ClusterConfig:
    """Settings that servers and workers of one measurement share."""
    parts, recipe = work.parts, recipe_of(work.model()[1])
    settings = ShardSettings(
        tuple(parts), OptimizerSpec(*recipe), workers, staleness=0, lease_s=LEASE_S
    )
    transport = Transport(read_key(key_file), key_file.parent.name)
    return ClusterConfig(
        transport, key_file.parent, settings, tuple(assign(parts, servers)), servers
    )


def judge(pipe: Connection, job: ClusterConfig, host: int) -> None:
    """Be the coordinator's keeper; tells its address."""
    nursery = HelperSpawner()
    found = CoordinatorProcess(nursery, job, address(host))
    answer(pipe, found.address)
    await_end(pipe)
    found.listener.close()
    nursery.close()


def server(
    pipe: Connection, job: ClusterConfig, shard: int, coordinator: Address, host: int
) -> None:
    """Hold one shard."""
    nursery = HelperSpawner()
    fleet = ServerPool(nursery, job, coordinator, address(host), machine=shard, machines=job.shards)
    await_end(pipe)
    fleet.close(0)
    nursery.close()


def worker(
    pipe: Connection, work: Work, job: ClusterConfig, coordinator: Address, rank: int
) -> dict[str, float]:
    """Step through the servers; seconds of a step, and what else was seen."""
    _gather(rank, job.settings.workers)
    weight, optimizer = work.model()
    parts = work.parts
    flat = FlatParams({"weight": weight}, parts)
    network = SocketNetwork(rank, coordinator, job.transport, flat, shares=False)
    client = WorkerClient(flat, network)
    if rank == 0:
        client.load([[{}] for _ in parts])
    client.mark_current()
    _barrier()
    for gradient in flat.gradients:
        gradient.fill_(rank + 1)
    order = StepRequest([settings_of(group) for group in optimizer.param_groups])

    def step() -> None:
        for part in parts:
            client.wait([part.number])
            _compute(work, FORWARD)
        for part in reversed(parts):
            _compute(work, 1 - FORWARD)
            client.push(part.number, flat.gradients[part.number], b"\1")
        client.request_step(order)

    found = _timed(step, lambda: client.wait(range(len(parts))), work.steps)
    _check(weight, job.settings.workers, work.steps)
    client.close()
    _part(job.settings.workers)
    return found


def link(pipe: Connection, size_bytes: int, rank: int) -> dict[str, float]:
    """Bytes a second from rank 1 to rank 0, by one connection; counted by rank 0, from the
    first byte on.
    """
    _gather(rank, 2)
    block = torch.zeros(size_bytes // 4)
    found = {}
    for name in ("warm-up", "bytes_per_s"):
        dist.barrier()
        started_s = time.perf_counter()
        dist.send(block, 0) if rank == 1 else dist.recv(block, 1)
        found[name] = size_bytes / (time.perf_counter() - started_s)
    _part(2)
    return found


def reduced(pipe: Connection, work: Work, workers: int, rank: int) -> dict[str, float]:
    """Step by Gloo's ring all-reduce of each bucket, as soon as it is there."""
    _gather(rank, workers)
    weight, optimizer = work.model()
    gradient = torch.zeros_like(weight)
    buckets = [gradient[p.segments[0].start : p.segments[0].start + p.length] for p in work.parts]

    def step() -> None:
        for _ in buckets:
            _compute(work, FORWARD)
        under_way = []
        for bucket in reversed(buckets):
            _compute(work, 1 - FORWARD)
            under_way.append(dist.all_reduce(bucket.fill_(rank + 1), async_op=True))
        for sum_of_bucket in under_way:
            sum_of_bucket.wait()
        weight.grad = gradient
        optimizer.step()

    found = _timed(step, lambda: None, work.steps)
    _check(weight, workers, work.steps)
    _part(workers)
    return found


def _compute(work: Work, share: float) -> None:
    """One part's share of a pass."""
    if work.compute_s:
        time.sleep(work.compute_s * share / len(work.parts))


def _timed(step: Callable[[], None], finish: Callable[[], None], steps: int) -> dict[str, float]:
    step()
    finish()
    _barrier()
    busy, started_s = _busy_s(), time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    passed_s = time.perf_counter() - started_s
    spent = [after - before for before, after in zip(busy, _busy_s(), strict=True)]
    return {"step_s": passed_s / steps, "busy": spent[0] / sum(spent)}


def _busy_s() -> list[int]:
    """Ticks in which this machine's cores worked, and in which they were idle, or as good as that:
    what runs at a lower priority gives way."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[1] + ticks[3] + ticks[4]
    return [sum(ticks) - idle, idle]


def _check(weight: Tensor, workers: int, steps: int) -> None:
    expected = -(steps + 1) * workers * (workers + 1) / 2
    assert bool((weight == expected).all()), (weight.min(), weight.max(), expected)


def _gather(rank: int, workers: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if workers > 1:
        meeting = f"tcp://{address(1)}:{RENDEZVOUS_PORT}"
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=workers, timeout=LIMIT
        )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _part(workers: int) -> None:
    _barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
