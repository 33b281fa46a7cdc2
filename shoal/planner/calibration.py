"""Measure a machine: what the planner needs, and nothing else.

For each number of ranks on this host (1, 2, 4, ... up to twice its cores), all of them at once:

      matmul, conv    FLOP/s over sizes, and memory bytes/s: each operation again and again
      operations      overhead of one, forward, backward, in an optimizer, and a factor for each
                      curve: what explains the steps of eight networks best (`in_steps`)
      collectives     seconds at six sizes, in shared memory; of Gloo what a message costs
      a step          what Shoal adds around a model's operations

Each number is a low one of its repetitions: what is above it comes from other programs. Its spread
is how far the median lies above it. A rank of one thread is timed by its processor time, which
other programs do not lengthen. Neighbours on a virtual machine's host do, from one second to the
next: operations take turns, and steps of Shoal are compared with a step of torch beside them. Ranks
measure at once, because ranks that train compute at once: what they take from each other (caches,
memory bandwidth) is in every number. More ranks than cores take turns, which the plan adds.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from statistics import median
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
    low_and_spread,
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
CONV_SHAPES = ((8, 16, 8), (8, 32, 16), (16, 32, 32), (16, 64, 32))
"""(batch, channels in and out, side of the image) of 3x3 convolutions."""
MEMORY_BYTES = 1 << 26
"""Of three arrays, more than caches hold: in a step, operations find what they read in none."""
COLLECTIVE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
BUDGET_S, ROUNDS = 0.08, 8
"""Seconds for each point of a curve, and the rounds that share them."""
STEPS_S = 0.6
"""Processor seconds of the steps of one case."""


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
        else:  # it has more threads; alone on its host it does around messages what two ranks do
            compute[few] = replace(compute[few], overheads=compute[many].overheads)
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


Sampler = Callable[[], Sequence[float]]
"""Takes one sample: the seconds of each of its parts."""


def _measure_rank() -> dict[str, Any]:
    """Measure on one rank, at the same time as all others. Collective."""
    samplers: list[Sampler] = [
        *map(_matmul, MATMUL_SIDES),
        *(_conv(*shape) for shape in CONV_SHAPES),
        _addition(MEMORY_BYTES),
        *map(torch_phases, NETWORKS),
    ]
    seconds = iter(_seconds_of(samplers))
    matmul = [_rate(2.0 * side**3, *next(seconds)[0]) for side in MATMUL_SIDES]
    conv = [_rate(_conv_flops(*shape), *next(seconds)[0], passes=3) for shape in CONV_SHAPES]
    memory = [_rate(MEMORY_BYTES, *next(seconds)[0])]
    ranks = dist.get_world_size()
    collectives = {}
    for kind in COLLECTIVES if ranks > 1 else ():
        points = tuple(_collective_point(kind, size) for size in COLLECTIVE_BYTES)
        collectives[f"shoal/{kind}/{ranks}"] = SpeedCurve(points)
    gloo = dist.new_group(backend="gloo") if ranks == 2 else None
    for kind in COLLECTIVES if gloo else ():
        point = _collective_point(kind, COLLECTIVE_BYTES[0], gloo)
        collectives[f"gloo/{kind}/{ranks}"] = SpeedCurve((point,))
    return {
        "curves": [SpeedCurve(tuple(sorted(points))) for points in (matmul, conv, memory)],
        "phases": [[s for s, _ in parts] for parts in seconds],
        "collectives": collectives,
        "overlap": _overlap_slowdown() if ranks > 1 else 1.0,
    }


def _seconds_of(samplers: Sequence[Sampler]) -> list[list[tuple[float, float]]]:
    """Return the seconds of each part of each sampler, and their spread.

    Samplers take turns for `ROUNDS` rounds: a neighbour of a virtual machine slows some rounds, and
    not one sampler.
    """
    samples: list[list[Sequence[float]]] = [[] for _ in samplers]
    for number, sampler in itertools.product(range(ROUNDS), range(len(samplers))):
        samplers[sampler]()
        end_s, enough = time.perf_counter() + BUDGET_S / ROUNDS, 3 * (number + 1)
        while len(samples[sampler]) < enough or time.perf_counter() < end_s:
            samples[sampler].append(samplers[sampler]())
    return [[low_and_spread(part) for part in zip(*each, strict=True)] for each in samples]


def _clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _calls(run: Callable[[], Any]) -> Sampler:
    """Return a sampler of a call, of so many together that the clock costs little."""
    clock = _clock()
    run()
    start_s = clock()
    run()
    number = max(1, int(2e-4 / max(clock() - start_s, 1e-6)))

    def sample() -> Sequence[float]:
        start_s = clock()
        for _ in range(number):
            run()
        return ((clock() - start_s) / number,)

    return sample


def _rate(work: float, seconds: float, spread: float, passes: int = 1) -> Point:
    return Point(float(work), passes * work / seconds, spread)


def _matmul(side: int) -> Sampler:
    a, b = torch.randn(side, side), torch.randn(side, side)
    out = torch.empty(side, side)
    return _calls(lambda: torch.mm(a, b, out=out))


def _conv(batch: int, channels: int, side: int) -> Sampler:
    """Return a sampler of a convolution forward and backward."""
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    images = torch.randn(batch, channels, side, side, requires_grad=True)
    gradient = torch.ones(batch, channels, side, side)
    return _calls(lambda: layer(images).backward(gradient))


def _conv_flops(batch: int, channels: int, side: int) -> float:
    return 2.0 * batch * channels * channels * 9 * side * side


def _addition(size_bytes: int) -> Sampler:
    """Return a sampler of an addition: two arrays read, one written."""
    numel = max(size_bytes // 12, 1)
    a, b, out = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    return _calls(lambda: torch.add(a, b, out=out))


def torch_phases(case: MakeStep) -> Sampler:
    """Return a sampler of a step's forward pass, backward pass and optimizer step, all of torch."""
    model, batch, optimizer_class = case()
    optimizer: Any = optimizer_class(model.parameters(), lr=0.0)  # type: ignore[call-arg]
    clock = _clock()

    def sample() -> Sequence[float]:
        times_s = [clock()]
        loss = _loss(model, batch)
        times_s.append(clock())
        loss.backward()
        times_s.append(clock())
        optimizer.step()
        times_s.append(clock())
        optimizer.zero_grad()
        return [end_s - start_s for start_s, end_s in pairwise(times_s)]

    return sample


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
    return model, torch.randn(32, 8), torch.optim.SGD


def network(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> Step:
    """Return a step of a network of `shoal.models`: its operations find caches cold.

    Args: shape: of a batch. It is random: gradients of zeros are denormal numbers, which are slow.
    """
    model = build(name, 32, shape[1:], options)
    is_text = len(shape) == 2
    batch = torch.randint(32, shape) if is_text else torch.randn(shape)
    return model, batch, torch.optim.AdamW


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
NETWORKS: Sequence[MakeStep] = (
    partial(tiny_blocks, 4, layers=6),
    partial(network, "mlp", {"hidden": [512, 256]}, (24, 1, 20, 20)),
    partial(network, "mlp", {"hidden": [256] * 4}, (200, 1, 10, 10)),
    partial(network, "residual_cnn", {"widths": [24, 48]}, (12, 3, 12, 12)),
    partial(network, "residual_cnn", {"widths": [8, 16, 32]}, (8, 3, 20, 20)),
    partial(network, "lstm", {"width": 96, "layers": 2}, (12, 12)),
    partial(network, "gpt", {"width": 96, "layers": 2, "heads": 3}, (6, 48)),
    partial(
        network,
        "gpt",
        {"width": 192, "layers": 3, "heads": 6},
        (4, 32),
    ),
)
"""Networks whose steps tell how long operations take where they find caches cold."""
REFERENCE: MakeStep = NETWORKS[-2]
"""The network whose step tells how fast the machine is at a moment."""


def _step_of(strategy: str, case: MakeStep) -> float:
    """Return how many times as long a step takes as one of `REFERENCE` by torch. Collective.

    Both in turn, by processor time, so that what slows one slows the other.
    """
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model, batch, optimizer_class = case()
    optimizer: Any = optimizer_class(model.parameters(), lr=0.0)  # type: ignore[call-arg]
    model, optimizer = run.prepare(model, optimizer)[:2]
    clock, phases = _clock(), torch_phases(REFERENCE)

    def step() -> float:
        start_s = clock()
        optimizer.zero_grad()
        run.forward_backward(lambda x: _loss(model, x), batch)
        optimizer.step()
        return clock() - start_s

    first_s = min(step() for _ in range(5))
    # Ranks must take as many steps, so rank 0 says how many.
    count = torch.tensor([min(max(int(STEPS_S / first_s), 20), 80)])
    dist.broadcast(count, 0)
    return median(step() / sum(phases()) for _ in range(int(count)))


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


CURVES = {"matmul": 0, "conv": 1}
"""Places of curves, the third of which is that of memory."""
LEAST_FACTOR = 0.1
"""The least factor of a curve: 0 would say that its operations take no time."""


def in_steps(curves: Sequence[SpeedCurve], phases: Sequence[Sequence[float]]) -> Compute:
    """Return the speeds that operations have in a step, where they find caches cold.

    The time of a phase is linear in the cost of an operation there and in one factor for each
    curve. Least squares of the relative errors of all phases of all networks find these six.

    Args:
        curves: of matmul, conv and memory, each operation again and again.
        phases: seconds of the forward pass, the backward pass and the optimizer's step of each of
            `NETWORKS`.
    """
    matmul, conv, memory = curves
    hot = Compute(matmul, conv, memory, 0.0, 0.0, 0.0, step_s=0.0)
    rows: list[list[float]] = []
    for case, seconds in zip(NETWORKS, phases, strict=True):
        work, _, samples = _traced(case)
        operations = (
            [op for segment in work.segments for op in segment.forward],
            [op for segment in work.segments for op in segment.backward],
            work.optimizer,
        )
        for number, (ops, took_s) in enumerate(zip(operations, seconds, strict=True)):
            row = [0.0] * 6
            for op in ops:
                row[number] += op.number * (VIEW_SHARE if op.kind == "view" else 1.0)
                row[3 + CURVES.get(op.kind, 2)] += hot.op_s(op, samples * (number < 2), 1.0, 0.0)
            rows.append([value / took_s for value in row])
    forward_s, backward_s, step_s, *factors = _least_squares(rows)
    matmul, conv, memory = (
        curve.scaled(1 / max(factor, LEAST_FACTOR))
        for curve, factor in zip(curves, factors, strict=True)
    )
    return Compute(matmul, conv, memory, forward_s, backward_s, step_s, step_s=0.0)


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return what is at least 0 and brings the product with each row closest to 1."""
    table = torch.tensor(rows, dtype=torch.float64)
    size = table.mean(0).clamp(min=1e-30)  # of columns: they have different units
    table, best = table / size, (math.inf, torch.zeros(len(size)))
    for chosen in itertools.product((False, True), repeat=len(size)):
        columns = table[:, torch.tensor(chosen)]
        solved = torch.linalg.lstsq(columns, torch.ones(len(rows), 1).double()).solution
        error = float((columns @ solved - 1).square().sum())
        if error < best[0] and bool((solved >= 0).all()):
            values = torch.zeros(len(size), dtype=torch.float64)
            values[torch.tensor(chosen)] = solved.flatten()
            best = error, values
    return (best[1] / size).tolist()


def _with_engines(speeds: Compute, machine: Machine, ranks: int) -> Compute:
    """Add what a step of Shoal costs beside its operations, and what strategies do around them.

    Args: machine: with the collectives of so many ranks.
    """

    def torch_s(case: MakeStep) -> float:
        return planned_step(machine, 1, "single", case)(replace(speeds, step_s=0.0))

    reference_s = torch_s(REFERENCE)
    took_s = _slowest(ranks, "ddp" if ranks > 1 else "single", PLAIN) * reference_s
    speeds = replace(speeds, step_s=max(took_s - torch_s(PLAIN), 1e-5))
    overheads: dict[str, float] = {}
    for names, (line, cases) in ENGINES.items() if ranks > 1 else ():
        strategy = line.format(ranks=ranks)
        extra_s: list[float] = []
        times: list[list[float]] = []
        for case in cases:
            # A world for each: passes of pipelines take longer after other steps in one.
            took_s = _slowest(ranks, strategy, case) * reference_s
            planned_s = planned_step(machine, ranks, strategy, case)
            without_s = planned_s(speeds)
            extra_s.append(took_s - without_s)
            one_second = (planned_s(replace(speeds, overheads={name: 1.0})) for name in names)
            times.append([seconds - without_s for seconds in one_second])
        solved = torch.linalg.lstsq(torch.tensor(times), torch.tensor(extra_s)[:, None]).solution
        overheads |= zip(names, solved.flatten().clamp(min=0.0).tolist(), strict=True)
    return replace(speeds, overheads=overheads)


def _slowest(ranks: int, strategy: str, case: MakeStep) -> float:
    """Return what `_step_of` does on the rank that takes longest."""
    return max(world.run(ranks, _step_of, strategy, case, timeout_s=300.0))


def _collective_point(kind: str, size_bytes: int, gloo: dist.ProcessGroup | None = None) -> Point:
    """Measure a collective whose whole tensor has `size_bytes`. Collective.

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
    repetitions = max(5, min(60, int(3e7 / (size_bytes + 1e5))))
    for number in range(repetitions + 2):
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
