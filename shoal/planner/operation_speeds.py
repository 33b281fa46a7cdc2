"""Measure what operations cost on their own, and find out what they cost inside of steps.

each operation again and again ──> curves over sizes ──┐
phases of eight networks by torch ─────────────────────┴─> `in_steps` ──> Compute
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.costs.machine import VIEW_SHARE, Compute, Point, SpeedCurve, low_and_spread
from shoal.costs.work import ModelWork
from shoal.models import build
from shoal.planner.trace_model import trace_model

MATMUL_SIDES = (16, 32, 64, 128, 256, 512, 1024)
CONV_SHAPES = ((8, 16, 8), (8, 32, 16), (16, 32, 32), (16, 64, 32))
"""(batch, channels in and out, side of the image) of 3x3 convolutions."""
MEMORY_BYTES = 1 << 26
"""Bytes of three arrays, more than caches hold: in a step, operations find theirs in none."""
BUDGET_S, ROUNDS = 0.08, 8
"""Seconds for each point of a curve, and the rounds that share them."""


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
NETWORKS: Sequence[MakeStep] = (
    partial(tiny_blocks, 4, layers=6),
    partial(network, "mlp", {"hidden": [512, 256]}, (24, 1, 20, 20)),
    partial(network, "mlp", {"hidden": [256] * 4}, (200, 1, 10, 10)),
    partial(network, "residual_cnn", {"widths": [24, 48]}, (12, 3, 12, 12)),
    partial(network, "residual_cnn", {"widths": [8, 16, 32]}, (8, 3, 20, 20)),
    partial(network, "lstm", {"width": 96, "layers": 2}, (12, 12)),
    partial(network, "gpt", {"width": 96, "layers": 2, "heads": 3}, (6, 48)),
    partial(network, "gpt", {"width": 192, "layers": 3, "heads": 6}, (4, 32)),
)
"""Networks whose steps tell how long operations take where they find caches cold."""
REFERENCE: MakeStep = NETWORKS[-2]
"""The network whose step tells how fast the machine is at a moment."""


Sampler = Callable[[], Sequence[float]]
"""Takes one sample: the seconds of each of its parts."""


def measure_operations() -> tuple[list[SpeedCurve], list[list[float]]]:
    """Return the curves of matmul, conv and memory, and the seconds of the phases of `NETWORKS`."""
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
    curves = [SpeedCurve(tuple(sorted(points))) for points in (matmul, conv, memory)]
    return curves, [[seconds for seconds, _ in parts] for parts in seconds]


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


def processor_clock() -> Callable[[], float]:
    """Return the clock of a rank: processor time, or the wall's where it has several threads."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _calls(run: Callable[[], Any]) -> Sampler:
    """Return a sampler of a call, of so many together that the clock costs little."""
    clock = processor_clock()
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
    clock = processor_clock()

    def sample() -> Sequence[float]:
        times_s = [clock()]
        loss = loss_of(model, batch)
        times_s.append(clock())
        loss.backward()
        times_s.append(clock())
        optimizer.step()
        times_s.append(clock())
        optimizer.zero_grad()
        return [end_s - start_s for start_s, end_s in pairwise(times_s)]

    return sample


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).logsumexp(-1).mean()  # type: ignore[no-any-return]


@cache  # a trace takes longer than the steps that it is compared with
def traced(case: MakeStep) -> tuple[ModelWork, nn.Module, int]:
    """Return the work of a case's step, its model and its samples."""
    model, batch, optimizer_class = case()
    work = trace_model(
        model,
        lambda x: loss_of(model, x),
        lambda module: optimizer_class(module.parameters(), lr=0.0),  # type: ignore[call-arg]
        (batch,),
    )
    return work, model, len(batch)


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
        work, _, samples = traced(case)
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
    ones = [1.0] * len(rows)
    forward_s, backward_s, step_s, *factors = nonnegative_least_squares(rows, ones)
    matmul, conv, memory = (
        curve.scaled(1 / max(factor, LEAST_FACTOR))
        for curve, factor in zip(curves, factors, strict=True)
    )
    return Compute(matmul, conv, memory, forward_s, backward_s, step_s, step_s=0.0)


def nonnegative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> list[float]:
    """Return what is at least 0 and brings the product with each row closest to its target."""
    table = torch.tensor(rows, dtype=torch.float64)
    goals = torch.tensor(targets, dtype=torch.float64)[:, None]
    size = table.mean(0).clamp(min=1e-30)  # of columns: they have different units
    table, best = table / size, (math.inf, torch.zeros(len(size)))
    for chosen in itertools.product((False, True), repeat=len(size)):
        columns = table[:, torch.tensor(chosen)]
        solved = torch.linalg.lstsq(columns, goals).solution
        error = float((columns @ solved - goals).square().sum())
        if error < best[0] and bool((solved >= 0).all()):
            values = torch.zeros(len(size), dtype=torch.float64)
            values[torch.tensor(chosen)] = solved.flatten()
            best = error, values
    return (best[1] / size).tolist()
