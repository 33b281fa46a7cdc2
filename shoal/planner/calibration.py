"""Measure a machine: what the planner needs, and nothing else.

For each number of ranks on this host (1, 2, 4, ... up to twice its cores), all of them at once:

      matmul, conv    FLOP/s over sizes, and memory bytes/s: each operation again and again
      operations      overhead of one, forward, backward, in an optimizer, and a factor for each
                      curve: what explains the steps of eight networks best (`in_steps`)
      collectives     seconds at six sizes, in shared memory; of Gloo what a message costs
      a step          what Shoal adds around a model's operations
      a server        what a part costs whatever its size, and bytes/s; for two ranks

Each number is a low one of its repetitions: what is above it comes from other programs. Its spread
is how far the median lies above it. A rank of one thread is timed by its processor time, which
other programs do not lengthen. Neighbours on a virtual machine's host do, from one second to the
next: operations take turns, and steps of Shoal are compared with a step of torch beside them. Ranks
measure at once, because ranks that train compute at once: what they take from each other (caches,
memory bandwidth) is in every number. More ranks than cores take turns, which the plan adds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.comm import equal_chunks
from shoal.costs.cluster import Cluster
from shoal.costs.machine import (
    Compute,
    Machine,
    Point,
    SpeedCurve,
    low_and_spread,
)
from shoal.costs.network import Network
from shoal.costs.step_cost import StepCost
from shoal.costs.step_tasks import SegmentTimer, least_seconds, step_time
from shoal.planner.find_machine import one_machine
from shoal.planner.operation_speeds import (
    NETWORKS,
    REFERENCE,
    MakeStep,
    in_steps,
    loss_of,
    measure_operations,
    network,
    nonnegative_least_squares,
    processor_clock,
    tiny_blocks,
    torch_phases,
    traced,
)
from shoal.planner.strategy_search import Planner, Workload
from shoal.platform.cgroups import usable_cores
from shoal.testing import world

COLLECTIVE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
CACHE_BYTES = 1 << 24
"""Bytes that are written before a collective, more than a core's cache holds."""
STEPS_S = 0.6
"""Processor seconds of the steps of one case."""
PART_S = [1e-5 * 1.4**power for power in range(18)]
SERVER_RATES = [1e8 * 1.3**power for power in range(20)]
"""Seconds of a part whatever its size, and bytes/s, that a server may have."""


MOST_RANKS = 8
"""Ranks that are measured at most. Blocks of `PLAIN` are enough for as many stages."""


def rank_counts(cores: int) -> list[int]:
    """Return the numbers of ranks that are measured: powers of two up to twice the cores."""
    counts = [1]
    while counts[-1] * 2 <= max(2 * cores, 2):
        counts.append(counts[-1] * 2)
    return [count for count in counts if count <= MOST_RANKS]


def calibrate(announce: Callable[[str], None] = print) -> Machine:
    """Measure this machine's CPUs. Takes a minute or two where nothing else runs."""
    compute: dict[int, Compute] = {}
    collectives: dict[str, SpeedCurve] = {}
    overlap = 1.0
    this = Machine(
        name=os.uname().nodename,
        device="cpu",
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        calibrated=True,
        compute={},
        cores=usable_cores(),
        note=f"{usable_cores()} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
    )
    for ranks in rank_counts(usable_cores()):
        start_s = time.perf_counter()
        measured = world.run(ranks, _measure_rank, timeout_s=300.0)
        collectives |= measured[0]["collectives"]
        slowest = max(measured, key=lambda rank: sum(map(sum, rank["phases"])))
        speeds = in_steps(slowest["curves"], slowest["phases"])
        now = replace(this, compute={ranks: speeds}, collectives=collectives)
        compute[ranks] = _with_engines(speeds, now, ranks)
        overlap = max(overlap, measured[0]["overlap"]) if ranks == 2 else overlap
        took_s = time.perf_counter() - start_s
        announce(f"{ranks} rank{'s' if ranks > 1 else ''} at once: measured in {took_s:.0f} s")
    # Fewer ranks are not slower than more: where they seem so, other programs have run meanwhile.
    for few, many in reversed([*pairwise(compute)]):
        if few > 1:
            compute[few] = compute[few].or_faster(compute[many])
    compute = {count: _with_overheads(count, compute) for count in compute}
    machine = replace(this, compute=compute, collectives=collectives, overlap_slowdown=overlap)
    start_s = time.perf_counter()
    machine = _with_server(machine)
    announce(f"a parameter server: measured in {time.perf_counter() - start_s:.0f} s")
    return machine


def _with_overheads(ranks: int, compute: Mapping[int, Compute]) -> Compute:
    """Return the speeds of so many ranks, with the overheads of the nearest number that has some.

    They are made of operations, which cost more in colder caches.
    """
    speeds = compute[ranks]
    if speeds.overheads:
        return speeds
    measured = [count for count, each in compute.items() if each.overheads]
    other = compute[min(measured, key=lambda count: abs(count - ranks))]
    factor = max(speeds.forward_op_s / other.forward_op_s, 1.0)
    overheads = {name: factor * seconds for name, seconds in other.overheads.items()}
    return replace(speeds, overheads=overheads)


def summary(machine: Machine) -> str:
    """Return a table of what was measured, a row for each number of ranks at once."""
    lines = ["ranks   matmul GFLOP/s   conv GFLOP/s   memory GB/s   operation us   step us"]
    for ranks, speeds in sorted(machine.compute.items()):
        matmul, conv, memory = (
            max(point.value for point in curve.points) / 1e9
            for curve in (speeds.matmul, speeds.conv, speeds.memory)
        )
        lines.append(
            f"{ranks:5} {matmul:16.1f} {conv:14.1f} {memory:13.1f} "
            f"{speeds.forward_op_s * 1e6:14.1f} {speeds.step_s * 1e6:9.0f}"
        )
    curves = [c for speeds in machine.compute.values() for c in (speeds.matmul, speeds.memory)]
    spreads = sorted(p.spread for c in (*curves, *machine.collectives.values()) for p in c.points)
    worst = spreads[int(0.9 * (len(spreads) - 1))]
    lines.append(
        f"spread: the median of the repetitions lies {spreads[len(spreads) // 2]:.0%} above the "
        f"least in the middle point, {worst:.0%} in nine of ten; computing beside a message is "
        f"{machine.overlap_slowdown:.2f} times as long"
    )
    if worst > 0.5:
        lines.append("other programs have run meanwhile: calibrate again when the machine is idle")
    return "\n".join(lines)


def _measure_rank() -> dict[str, Any]:
    """Measure on one rank, at the same time as all others. Collective."""
    curves, phases = measure_operations()
    ranks = dist.get_world_size()
    reference, usual_s = torch_phases(REFERENCE), sum(phases[NETWORKS.index(REFERENCE)])

    def point(kind: str, size: int, gloo: dist.ProcessGroup | None = None) -> Point:
        # A neighbour may slow the machine for a minute: seconds are those of operations' minute.
        slow = median(sum(reference()) for _ in range(3)) / usual_s
        measured = _collective_point(kind, size, gloo)
        return measured._replace(value=measured.value / slow)

    collectives = {}
    for kind in COLLECTIVES if ranks > 1 else ():
        points = tuple(point(kind, size) for size in COLLECTIVE_BYTES)
        collectives[f"shoal/{kind}/{ranks}"] = SpeedCurve(points)
    gloo = dist.new_group(backend="gloo") if ranks == 2 else None
    for kind in COLLECTIVES if gloo else ():
        curve = SpeedCurve((point(kind, COLLECTIVE_BYTES[0], gloo),))
        collectives[f"gloo/{kind}/{ranks}"] = curve
    return {
        "curves": curves,
        "phases": phases,
        "collectives": collectives,
        "overlap": _overlap_slowdown() if ranks > 1 else 1.0,
    }


PLAIN: MakeStep = partial(tiny_blocks, 8)
MANY_PARAMETERS: MakeStep = partial(tiny_blocks, 8, layers=6)
SERVER = "server=1"
Engine = tuple[str, tuple[str, ...], Sequence[MakeStep]]
"""A strategy line, names of `Compute.overheads` that its `cost` uses, and steps that tell them."""


def networks_of(layers: int) -> list[MakeStep]:
    """Return two networks in whose steps engines find caches cold."""
    return [
        partial(network, "mlp", {"hidden": [192] * layers}, (48, 1, 12, 12)),
        partial(network, "gpt", {"width": 128, "layers": layers, "heads": 8}, (4, 24)),
    ]


def engines(ranks: int) -> list[Engine]:
    """Return the strategies that do something around operations.

    Around layers of eight numbers they find caches warm, around those of networks cold: both count.
    """
    networks = networks_of(max(ranks, 4))  # into as many stages
    pairs = partial(tiny_blocks, 8, layers=2)
    units = (PLAIN, MANY_PARAMETERS, *networks)
    return [
        ("zero3", ("fsdp message", "fsdp tensor"), units),
        (SERVER, ("server parameter",), units),
        (
            f"pipeline={ranks}",
            ("pipeline pass", "pipeline unit"),
            (PLAIN, partial(tiny_blocks, 24), *networks),
        ),
        (f"tensor={ranks}", ("tensor sum",), (pairs, *networks)),
        ("recompute,ddp", ("recompute unit",), (PLAIN, *networks)),
    ]


def _steps_of(strategy: str, cases: Sequence[MakeStep], by_wall: bool = False) -> list[float]:
    """Return how many times as long each case's step takes as one of `REFERENCE` by torch.
    Collective.
    """
    return [_step_of(strategy, case, by_wall) for case in cases]


def _step_of(strategy: str, case: MakeStep, by_wall: bool) -> float:
    """Return how many times as long a step takes as one of `REFERENCE` by torch. Collective.

    Both in turn, by processor time, so that what slows one slows the other.

    Args: by_wall: count the time of the wall's clock, for a step in which other processes compute.
    """
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model, batch, optimizer_class = case()
    optimizer: Any = optimizer_class(model.parameters(), lr=0.0)  # type: ignore[call-arg]
    model, optimizer = run.prepare(model, optimizer)[:2]
    clock = time.perf_counter if by_wall else processor_clock()
    phases = torch_phases(REFERENCE)

    def step() -> float:
        if by_wall:  # else a rank would wait in its step for another one's reference
            dist.barrier()
        start_s = clock()
        optimizer.zero_grad()
        run.forward_backward(lambda x: loss_of(model, x), batch)
        optimizer.step()
        return clock() - start_s

    first_s = min(step() for _ in range(5))
    # Ranks must take as many steps, so rank 0 says how many.
    count = torch.tensor([min(max(int(STEPS_S / first_s), 20), 80)])
    dist.broadcast(count, 0)
    return median(step() / sum(phases()) for _ in range(int(count)))


def planned_step(
    machine: Machine, ranks: int, strategy: str, case: MakeStep
) -> Callable[[Compute], float]:
    """Return a function from speeds to the seconds that such a step takes a rank by a plan."""
    # Ranks that take turns on a core are timed by what they compute.
    machine = replace(machine, cores=0)
    cluster = one_machine(machine, ranks)
    is_together = strategy.startswith(("pipeline", "tensor"))
    data_ranks = 1 if is_together else ranks  # together they compute the same batch
    step = _step_cost(machine, cluster, strategy, case, data_ranks)

    def seconds(speeds: Compute) -> float:
        changed = replace(machine, compute={ranks: speeds})
        return least_seconds(step, SegmentTimer(changed, ranks), Network(changed, cluster))

    return seconds


def _step_cost(
    machine: Machine, cluster: Cluster, strategy: str, case: MakeStep, data_ranks: int
) -> StepCost:
    """Return a plan's step of a case. Args: data_ranks: that have its samples each."""
    work, model, samples = traced(case)
    workload = Workload(work, model, data_ranks * samples)
    return Planner(workload, machine, cluster).step_cost(strategy)


def _with_engines(speeds: Compute, machine: Machine, ranks: int) -> Compute:
    """Add what a step of Shoal costs beside its operations, and what strategies do around them.

    Args: machine: with the collectives of so many ranks.
    """

    def torch_s(case: MakeStep) -> float:
        return planned_step(machine, 1, "single", case)(replace(speeds, step_s=0.0))

    reference_s = torch_s(REFERENCE)
    (steps,) = _slowest(ranks, "ddp" if ranks > 1 else "single", [PLAIN])
    speeds = replace(speeds, step_s=max(steps * reference_s - torch_s(PLAIN), 1e-5))
    return replace(speeds, overheads=_overheads(speeds, machine, ranks, reference_s))


def _overheads(
    speeds: Compute, machine: Machine, ranks: int, reference_s: float
) -> dict[str, float]:
    """Return what strategies do around operations, by the steps of `engines`.

    Ranks that take turns on cores do as two ranks do, and in colder caches.
    """
    if ranks == 1 or ranks > max(machine.cores, 2):
        return {}
    overheads: dict[str, float] = {}
    for strategy, names, cases in engines(ranks):
        rows: list[list[float]] = []
        targets: list[float] = []
        for case, steps in zip(cases, _slowest(ranks, strategy, cases), strict=True):
            planned_s = planned_step(machine, ranks, strategy, case)
            without_s, took_s = planned_s(speeds), steps * reference_s
            one_second = (planned_s(replace(speeds, overheads={name: 1.0})) for name in names)
            rows.append([(seconds - without_s) / took_s for seconds in one_second])
            targets.append((took_s - without_s) / took_s)
        overheads |= zip(names, nonnegative_least_squares(rows, targets), strict=True)
    return overheads


def _with_server(machine: Machine) -> Machine:
    """Add the speed of a parameter server, by steps of two ranks with one.

    Those two numbers of a grid count whose times are nearest, by least squares of logarithms.
    """
    cases = (PLAIN, MANY_PARAMETERS, *networks_of(4))
    cluster, timer = one_machine(machine, 2), SegmentTimer(machine, 2)
    steps = [_step_cost(machine, cluster, SERVER, case, 2) for case in cases]
    by_torch = replace(machine.compute_of(2), step_s=0.0)
    reference_s = planned_step(machine, 1, "single", REFERENCE)(by_torch)
    took = [ratio * reference_s for ratio in _slowest(2, SERVER, cases, by_wall=True)]
    grid = [
        replace(machine, server_part_s=part_s, server_rate=rate)
        for part_s in PART_S
        for rate in SERVER_RATES
    ]

    def error(each: Machine) -> float:
        network = Network(each, cluster)
        planned = (step_time(step, timer, network).seconds for step in steps)
        return sum(math.log(p / t) ** 2 for p, t in zip(planned, took, strict=True))

    return min(grid, key=error)


def _slowest(
    ranks: int, strategy: str, cases: Sequence[MakeStep], by_wall: bool = False
) -> list[float]:
    """Return what `_steps_of` does on the rank that takes longest."""
    steps = world.run(ranks, _steps_of, strategy, cases, by_wall, timeout_s=300.0)
    return [max(case) for case in zip(*steps, strict=True)]


def _collective_point(kind: str, size_bytes: int, gloo: dist.ProcessGroup | None = None) -> Point:
    """Measure a collective whose whole tensor has `size_bytes`. Collective.

    A step computes between its messages, so they find their bytes in no cache.

    Args: gloo: a group of all ranks, in which messages take a network's way; else shared memory.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(-(-size_bytes // 4 // ranks) * ranks)
    part = torch.zeros(len(whole) // ranks)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=gloo),
        "all_gather": lambda: equal_chunks.all_gather(whole, part, group=gloo),
        "reduce_scatter": lambda: equal_chunks.reduce_scatter(part, whole, group=gloo),
        "broadcast": lambda: dist.broadcast(whole, 0, gloo),
        "send": lambda: _ping_pong(whole, rank, gloo),
    }
    # In shared memory a message is copied and added by the rank itself.
    clock = time.perf_counter if kind == "send" or gloo else time.process_time
    samples: list[float] = []
    repetitions = max(5, min(30, int(3e7 / (size_bytes + 1e5))))
    other = torch.zeros(CACHE_BYTES // 4)
    for number in range(repetitions + 2):
        other.add_(1.0)
        dist.barrier(gloo)
        start_s = clock()
        calls[kind]()
        if number >= 2:
            samples.append(clock() - start_s)
    seconds, spread = low_and_spread(samples)
    return Point(float(size_bytes), seconds / (2 if kind == "send" else 1), spread)


def _ping_pong(tensor: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    """Send there and back between ranks 0 and 1."""
    if rank == 0:
        dist.send(tensor, 1, group)
        dist.recv(tensor, 1, group)
    elif rank == 1:
        dist.recv(tensor, 0, group)
        dist.send(tensor, 0, group)


def _overlap_slowdown() -> float:
    """Return the factor of a matrix product's time while an all-reduce is under way. Collective."""
    a, out = torch.randn(256, 256), torch.empty(256, 256)
    message = torch.zeros(1 << 22)

    def computing() -> float:
        start_s = time.perf_counter()
        for _ in range(20):
            torch.mm(a, a, out=out)
        return time.perf_counter() - start_s

    computing()
    ratios: list[float] = []
    for _ in range(15):
        alone_s = computing()
        work = dist.all_reduce(message, async_op=True)
        ratios.append(computing() / alone_s)
        work.wait()
    return max(1.0, sorted(ratios)[len(ratios) // 2])
