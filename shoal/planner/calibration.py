"""Measure a machine: what the planner needs, and nothing else.

For each number of ranks on this host (1, 2, 4, ... up to twice its cores), all of them at once:

      matmul, conv    FLOP/s over sizes            memory   bytes/s over sizes
      operations      overhead of one, forward, backward, in an optimizer
      collectives     seconds at six sizes, in shared memory
      a step          what Shoal adds around a model's operations

Each number is the least of its repetitions, as in `timeit`: what is above it comes from other
programs. Its spread is how far the median lies above it. A rank of one thread is timed by its
processor time, which other programs do not lengthen. Ranks measure at once, because ranks that
train compute at once: what they take from each other (caches, memory bandwidth) is in every number.
More ranks than cores take turns, which the plan adds.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.comm import equal_chunks
from shoal.costs.machine import (
    VIEW_SHARE,
    Compute,
    Machine,
    Point,
    SpeedCurve,
    least_and_spread,
)
from shoal.costs.network import Network
from shoal.costs.step_tasks import SegmentTimer, least_seconds
from shoal.costs.work import ModelWork
from shoal.models import build
from shoal.planner.find_machine import one_machine
from shoal.planner.strategy_search import Planner, Workload
from shoal.planner.trace_model import trace_model
from shoal.platform.cgroups import usable_cores
from shoal.testing import world

MATMUL_SIDES = (16, 32, 64, 128, 256, 512, 1024)
CONV_SHAPES = ((8, 16, 8), (8, 32, 16), (16, 32, 32), (16, 64, 32), (32, 128, 32))
"""(batch, channels in and out, side of the image) of 3x3 convolutions."""
MEMORY_BYTES = tuple(1 << power for power in range(12, 27, 2))
COLLECTIVE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
BUDGET_S = 0.08
"""Seconds for each point of a curve."""


MOST_RANKS = 8
"""Ranks that are measured at most. Blocks of `ENGINES` are enough for as many stages."""


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
        speeds = measured[0]["compute"]
        now = replace(this, compute={ranks: speeds}, collectives=collectives)
        compute[ranks] = _with_engines(speeds, now, ranks)
        overlap = max(overlap, measured[0]["overlap"]) if ranks == 2 else overlap
        took_s = time.perf_counter() - start_s
        announce(f"{ranks} rank{'s' if ranks > 1 else ''} at once: measured in {took_s:.0f} s")
    return replace(
        this,
        compute=compute,
        collectives=collectives,
        server_rate=_server_rate(compute),
        overlap_slowdown=overlap,
    )


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


def _server_rate(compute: dict[int, Compute]) -> float:
    """Return the bytes/s of gradients that a server sums and steps.

    It reads a gradient, adds it to the sum, and reads and writes about six arrays to step: about
    a third of the memory's bandwidth for gradients. One server has one thread.
    """
    most = max(compute)
    return compute[most].memory.points[-1].value / 9


def _measure_rank() -> dict[str, Any]:
    """Measure on one rank, at the same time as all others. Collective."""
    matmul = SpeedCurve(tuple(_matmul_point(side) for side in MATMUL_SIDES))
    conv = SpeedCurve(tuple(sorted(_conv_point(*shape) for shape in CONV_SHAPES)))
    memory = SpeedCurve(tuple(_memory_point(size) for size in MEMORY_BYTES))
    forward_s, backward_s, step_op_s = _op_overheads()
    speeds = Compute(matmul, conv, memory, forward_s, backward_s, step_op_s, step_s=0.0)
    ranks = dist.get_world_size()
    collectives = {}
    if ranks > 1:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"):
            points = tuple(_collective_point(kind, size) for size in COLLECTIVE_BYTES)
            collectives[f"shoal/{kind}/{ranks}"] = SpeedCurve(points)
    return {
        "compute": speeds,
        "collectives": collectives,
        "overlap": _overlap_slowdown() if ranks > 1 else 1.0,
    }


def _timed(
    run: Callable[[], Any], budget_s: float = BUDGET_S, is_small: bool = False
) -> tuple[float, float]:
    """Return the least seconds of a call and their spread, from about `budget_s` of calls.

    Args: is_small: torch uses one thread for it, however many there are.
    """
    uses_one_thread = is_small or torch.get_num_threads() == 1
    clock = time.process_time if uses_one_thread else time.perf_counter
    run()
    start_s = clock()
    run()
    once_s = max(clock() - start_s, 1e-7)
    inner = max(1, int(2e-4 / once_s))  # a clock costs a microsecond
    samples: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < end_s and len(samples) < 100):
        start_s = clock()
        for _ in range(inner):
            run()
        samples.append((clock() - start_s) / inner)
    return least_and_spread(samples)


def _matmul_point(side: int) -> Point:
    a, b = torch.randn(side, side), torch.randn(side, side)
    out = torch.empty(side, side)
    seconds, spread = _timed(lambda: torch.mm(a, b, out=out))
    flops = 2.0 * side**3
    return Point(flops, flops / seconds, spread)


def _conv_point(batch: int, channels: int, side: int) -> Point:
    """Measure a convolution forward and backward; return their common rate."""
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    images = torch.randn(batch, channels, side, side, requires_grad=True)
    gradient = torch.ones(batch, channels, side, side)

    def run() -> None:
        layer(images).backward(gradient)

    seconds, spread = _timed(run)
    flops = 2.0 * batch * channels * channels * 9 * side * side
    return Point(flops, 3 * flops / seconds, spread)


def _memory_point(size_bytes: int) -> Point:
    """Measure an addition: two arrays read, one written."""
    numel = max(size_bytes // 12, 1)
    a, b, out = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    tiny = torch.zeros(1)
    overhead_s, _ = _timed(lambda: torch.add(tiny, tiny, out=tiny), BUDGET_S / 4)
    seconds, spread = _timed(lambda: torch.add(a, b, out=out))
    return Point(float(size_bytes), size_bytes / max(seconds - overhead_s, seconds * 0.05), spread)


def _op_overheads() -> tuple[float, float, float]:
    """Return the seconds that an operation costs whatever its size.

    Layers of eight numbers compute nothing, so their time over the number of operations, as the
    planner counts them, is what an operation costs: in a module's forward pass, in the backward
    pass, in an optimizer.
    """
    layers = (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    model = nn.Sequential(*(layer for _ in range(12) for layer in copy.deepcopy(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(2, 8)

    def forward() -> Tensor:
        return model(x).sum()  # type: ignore[no-any-return]

    work = trace_model(
        model,
        lambda x: model(x).sum(),
        lambda module: torch.optim.AdamW(module.parameters()),
        (x,),
    )
    forward_s, _ = _timed(forward, is_small=True)
    both_s, _ = _timed(lambda: forward().backward(), is_small=True)
    step_s, _ = _timed(optimizer.step, is_small=True)
    counts = [
        sum(op.number * (VIEW_SHARE if op.kind == "view" else 1.0) for op in ops)
        for ops in (
            [op for segment in work.segments for op in segment.forward],
            [op for segment in work.segments for op in segment.backward],
            work.optimizer,
        )
    ]
    return forward_s / counts[0], max(both_s - forward_s, 0.0) / counts[1], step_s / counts[2]


class _TinyBlock(nn.Module):
    """Layers of eight numbers. Two of them are a pair for tensor parallelism."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for number in range(layers):
            self.layers.append(nn.Linear(8, 8))
            if number < layers - 1:
                self.layers.append(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


Step = tuple[nn.Module, Tensor, type[torch.optim.Optimizer]]
"""A model, its batch, and what trains it."""


def tiny_blocks(blocks: int, layers: int = 1) -> Step:
    """Return a step whose operations cost little beside what a strategy does around them."""
    model = nn.Sequential(*(_TinyBlock(layers) for _ in range(blocks)))
    return model, torch.zeros(32, 8), torch.optim.SGD


def network(name: str, options: dict[str, Any], samples: Tensor) -> Step:
    """Return a step of a network of `shoal.models`: its operations find caches cold."""
    model = build(name, 32, tuple(samples.shape[1:]), options)
    return model, samples, torch.optim.AdamW


MakeStep = Callable[[], Step]
PLAIN: MakeStep = partial(tiny_blocks, 8)
ENGINES: Mapping[tuple[str, ...], tuple[str, Sequence[MakeStep]]] = {
    ("fsdp message", "fsdp tensor"): (
        "zero3",
        (partial(tiny_blocks, 8), partial(tiny_blocks, 8, layers=6)),
    ),
    ("pipeline pass", "pipeline unit"): (
        "pipeline={ranks}",
        (partial(tiny_blocks, 8), partial(tiny_blocks, 24)),
    ),
    ("tensor sum",): ("tensor={ranks}", (partial(tiny_blocks, 8, layers=2),)),
}
"""Names of `Compute.overheads`, as strategies' `cost` uses them -> steps that tell them apart."""
WHOLE: Sequence[MakeStep] = (
    partial(network, "mlp", {"hidden": [512, 256]}, torch.zeros(24, 1, 20, 20)),
    partial(network, "residual_cnn", {"widths": [24, 48]}, torch.zeros(12, 3, 12, 12)),
    partial(
        network,
        "gpt",
        {"width": 96, "layers": 2, "heads": 3},
        torch.zeros(6, 48, dtype=torch.long),
    ),
)


def _steps_of(strategy: str, cases: Sequence[MakeStep]) -> list[float]:
    """Return the processor seconds of a step of each case. Collective."""
    return [_step_of(strategy, case) for case in cases]


def _step_of(strategy: str, case: MakeStep) -> float:
    """Return the processor seconds of a step. Collective."""
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model, batch, optimizer_class = case()
    optimizer: Any = optimizer_class(model.parameters(), lr=0.0)  # type: ignore[call-arg]
    model, optimizer = run.prepare(model, optimizer)[:2]
    samples: list[float] = []
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for number in range(40):
        start_s = clock()
        optimizer.zero_grad()
        run.forward_backward(lambda x: _loss(model, x), batch)
        optimizer.step()
        if number >= 10:
            samples.append(clock() - start_s)
    return least_and_spread(samples)[0]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).logsumexp(-1).mean()  # type: ignore[no-any-return]


@cache  # a trace takes longer than the steps that it is compared with
def _traced(case: MakeStep) -> tuple[ModelWork, nn.Module, int]:
    """Return the work of a case's step, its model and its samples."""
    model, batch, optimizer_class = case()
    work = trace_model(
        model,
        lambda x: _loss(model, x),
        lambda module: optimizer_class(module.parameters(), lr=0.0),  # type: ignore[call-arg]
        (batch,),
    )
    return work, model, len(batch)


def planned_step(
    machine: Machine, ranks: int, strategy: str, case: MakeStep
) -> Callable[[Compute], float]:
    """Return a function from speeds to the seconds that such a step takes a rank by a plan."""
    work, model, samples = _traced(case)
    # Ranks that take turns on a core are timed by what they compute.
    machine = replace(machine, cores=0)
    cluster = one_machine(machine, ranks)
    data_ranks = 1 if "=" in strategy else ranks  # else they compute the same batch together
    workload = Workload(work, model, data_ranks * samples)
    step = Planner(workload, machine, cluster).step_cost(strategy)

    def seconds(speeds: Compute) -> float:
        changed = replace(machine, compute={ranks: speeds})
        return least_seconds(step, SegmentTimer(changed, ranks), Network(changed, cluster))

    return seconds


def _with_engines(speeds: Compute, machine: Machine, ranks: int) -> Compute:
    """Add what a step of Shoal costs beside its operations, and what strategies do around them.

    Args: machine: with the collectives of so many ranks.
    """

    plain = "ddp" if ranks > 1 else "single"
    times_s = _slowest(ranks, plain, [PLAIN, *WHOLE])
    planned_s = planned_step(machine, ranks, plain, PLAIN)
    speeds = replace(speeds, step_s=max(times_s[0] - planned_s(speeds), 1e-5))
    factors = []
    for whole, took_s in zip(WHOLE, times_s[1:], strict=True):
        planned_s = planned_step(machine, ranks, plain, whole)
        operations_s = planned_s(replace(speeds, whole_step=2.0)) - planned_s(speeds)
        factors.append(max(1.0, 1.0 + (took_s - planned_s(speeds)) / operations_s))
    speeds = replace(speeds, whole_step=geometric_mean(factors))
    overheads: dict[str, float] = {}
    for names, (line, cases) in ENGINES.items() if ranks > 1 else ():
        strategy = line.format(ranks=ranks)
        extra_s: list[float] = []
        times: list[list[float]] = []
        for case in cases:
            # A world for each: passes of pipelines take longer after other steps in one.
            (took_s,) = _slowest(ranks, strategy, [case])
            planned_s = planned_step(machine, ranks, strategy, case)
            without_s = planned_s(speeds)
            extra_s.append(took_s - without_s)
            one_second = (planned_s(replace(speeds, overheads={name: 1.0})) for name in names)
            times.append([seconds - without_s for seconds in one_second])
        solved = torch.linalg.lstsq(torch.tensor(times), torch.tensor(extra_s)[:, None]).solution
        overheads |= zip(names, solved.flatten().clamp(min=0.0).tolist(), strict=True)
    return replace(speeds, overheads=overheads)


def _slowest(ranks: int, strategy: str, cases: Sequence[MakeStep]) -> list[float]:
    """Return the seconds of a step of each case on the rank that takes longest."""
    times_s = world.run(ranks, _steps_of, strategy, cases, timeout_s=300.0)
    return [max(each) for each in zip(*times_s, strict=True)]


def _collective_point(kind: str, size_bytes: int) -> Point:
    """Measure a collective whose whole tensor has `size_bytes`. Collective."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(-(-size_bytes // 4 // ranks) * ranks)
    part = torch.zeros(len(whole) // ranks)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: equal_chunks.all_gather(whole, part),
        "reduce_scatter": lambda: equal_chunks.reduce_scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": lambda: _ping_pong(whole, rank),
    }
    # In shared memory a message is copied and added by the rank itself.
    clock = time.perf_counter if kind == "send" else time.process_time
    samples: list[float] = []
    repetitions = max(5, min(60, int(3e7 / (size_bytes + 1e5))))
    for number in range(repetitions + 2):
        start_s = clock()
        calls[kind]()
        if number >= 2:
            samples.append(clock() - start_s)
    seconds, spread = least_and_spread(samples)
    return Point(float(size_bytes), seconds / (2 if kind == "send" else 1), spread)


def _ping_pong(tensor: Tensor, rank: int) -> None:
    """Send there and back between ranks 0 and 1."""
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


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
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(7):
        alone.append(computing())
        work = dist.all_reduce(message, async_op=True)
        beside.append(computing())
        work.wait()
    return max(1.0, least_and_spread(beside)[0] / least_and_spread(alone)[0])
