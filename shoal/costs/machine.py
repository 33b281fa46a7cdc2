"""Speeds of a machine: what `shoal calibrate` measures, or what a datasheet states.

A speed depends on size: small matrices use a core badly, small messages cost their latency. So each
is a curve through measured points, and between them a line in the logarithms of both. Every point
has its spread: how far the median of the repetitions lies above the least of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from shoal.costs.work import OpWork
from shoal.errors import ConfigError


class Point(NamedTuple):
    """A measured point of a curve."""

    size: float
    value: float
    spread: float = 0.0


@dataclass(frozen=True)
class SpeedCurve:
    """Values over sizes, both above 0, ascending by size."""

    points: tuple[Point, ...]

    def at(self, size: float) -> float:
        """Return the value at a size; beyond the ends that of the end."""
        points = self.points
        if size <= points[0].size or len(points) == 1:
            return points[0].value
        for low, high in pairwise(points):
            if size <= high.size:
                way = math.log(size / low.size) / math.log(high.size / low.size)
                return float(low.value * (high.value / low.value) ** way)
        return points[-1].value

    def seconds_at(self, size: float) -> float:
        """Return a time that grows in proportion to size beyond the last point."""
        last = self.points[-1]
        return self.at(size) * max(1.0, size / last.size)

    def scaled(self, factor: float) -> SpeedCurve:
        """Return the curve with each value multiplied."""
        return SpeedCurve(tuple(p._replace(value=p.value * factor) for p in self.points))


@dataclass(frozen=True)
class Compute:
    """Speeds of one rank while all ranks of its host compute.

    Attributes:
        matmul, conv: FLOP/s over FLOPs of an operation.
        memory: bytes/s over bytes read and written.
        forward_op_s, backward_op_s, step_op_s: seconds that an operation costs whatever its size:
            in a module's forward pass, in the backward pass, in an optimizer.
        step_s: seconds of a step of Shoal around all operations.
        float32: kind of operation -> share of its rate with numbers of more than 16 bits, where the
            curves are of 16 bits. {}: of all alike.
        overheads: seconds that engines in Python take beside operations, by what they do: see
            `shoal.planner.calibration`. What is not there was not measured, and counts nothing.
    """

    matmul: SpeedCurve
    conv: SpeedCurve
    memory: SpeedCurve
    forward_op_s: float
    backward_op_s: float
    step_op_s: float
    step_s: float
    float32: Mapping[str, float] = field(default_factory=dict)
    overheads: Mapping[str, float] = field(default_factory=dict)

    def or_faster(self, other: Compute) -> Compute:
        """Return the faster of both speeds, one by one."""

        def faster(mine: SpeedCurve, others: SpeedCurve) -> SpeedCurve:
            pairs = zip(mine.points, others.points, strict=True)
            return SpeedCurve(tuple(max(pair, key=lambda point: point.value) for pair in pairs))

        return replace(
            self,
            matmul=faster(self.matmul, other.matmul),
            conv=faster(self.conv, other.conv),
            memory=faster(self.memory, other.memory),
            forward_op_s=min(self.forward_op_s, other.forward_op_s),
            backward_op_s=min(self.backward_op_s, other.backward_op_s),
            step_op_s=min(self.step_op_s, other.step_op_s),
            step_s=min(self.step_s, other.step_s),
        )

    def slower(self, factor: float) -> Compute:
        """Return the speeds where everything but optimizers takes `factor` times as long."""
        return replace(
            self,
            matmul=self.matmul.scaled(1 / factor),
            conv=self.conv.scaled(1 / factor),
            memory=self.memory.scaled(1 / factor),
            forward_op_s=self.forward_op_s * factor,
            backward_op_s=self.backward_op_s * factor,
            step_s=self.step_s * factor,
        )

    def overhead_s(self, around: Sequence[tuple[str, float]]) -> float:
        """Return the seconds of things that engines do.

        Args: around: (name of `overheads`, how often).
        """
        return sum(number * self.overheads.get(name, 0.0) for name, number in around)

    def op_s(self, op: OpWork, samples: float, share: float, overhead_s: float) -> float:
        """Return the seconds of `op.number` operations.

        t = overhead + max(FLOPs / rate(FLOPs), bytes / bandwidth(bytes)): the roofline model
        (Williams et al., CACM 2009) with an efficiency that depends on size.
        """
        if op.kind == "view":
            return op.number * overhead_s * VIEW_SHARE
        moved = op.moved_bytes.at(samples) * share
        time_s = moved / self.memory.at(moved) if moved > 0 else 0.0
        flops = op.flops.at(samples) * share
        if flops > 0:
            rate = (self.conv if op.kind == "conv" else self.matmul).at(flops)
            if op.itemsize > 2:
                rate *= self.float32.get(op.kind, 1.0)
            time_s = flops / rate
        return op.number * (overhead_s + time_s)


VIEW_SHARE = 0.3
"""Share of an operation's overhead that a view costs: it allocates and computes nothing."""


@dataclass(frozen=True)
class Machine:
    """A host's speeds.

    Attributes:
        device: cpu or cuda.
        memory_bytes: of a rank's device; of the host for a CPU.
        calibrated: measured here; else from datasheets.
        compute: ranks on the host -> speeds of each.
        collectives: backend/kind/ranks -> seconds over bytes of the whole tensor.
        server_rate: bytes/s that one parameter server receives, sums and steps, on a core of the
            host.
        server_part_s: seconds that pushing a part costs whatever its size, and pulling it.
        link_rate: bytes/s between devices of the host, one way.
        overlap_slowdown: factor of computing while a message is under way.
        cores: that ranks on CPUs share; 0 where each rank has a device.
    """

    name: str
    device: str
    memory_bytes: float
    calibrated: bool
    compute: Mapping[int, Compute]
    collectives: Mapping[str, SpeedCurve] = field(default_factory=dict)
    server_rate: float = 1e9
    server_part_s: float = 0.0
    link_rate: float = 1e10
    overlap_slowdown: float = 1.0
    note: str = ""
    cores: int = 0

    def compute_of(self, ranks: int) -> Compute:
        """Return the speeds of each of `ranks` ranks on one host."""
        return self.compute[self.measured_ranks(ranks)]

    def measured_ranks(self, ranks: int) -> int:
        """Return the number of ranks whose speeds stand for those of `ranks`."""
        return min((count for count in self.compute if count >= ranks), default=max(self.compute))

    def crowding(self, ranks: int) -> float:
        """Return the factor by which more ranks than cores slow each other down."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def collective(self, backend: str, kind: str, ranks: int) -> SpeedCurve | None:
        """Return the measured seconds of a collective, of as many ranks or the next number."""
        found = {
            int(key.rsplit("/", 1)[1]): curve
            for key, curve in self.collectives.items()
            if key.startswith(f"{backend}/{kind}/")
        }
        fitting = [count for count in sorted(found) if count >= ranks]
        return found[fitting[0]] if fitting else None

    def save(self, path: Path) -> None:
        """Write the machine as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def default_path() -> Path:
    """Return where the calibration of this machine lies: $XDG_CACHE_HOME/shoal/machine.json."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "shoal" / "machine.json"


def load(path: Path) -> Machine:
    """Read a machine from JSON.

    Raises: ConfigError: with the first thing that is missing, unknown or not positive.
    """
    try:
        read = json.loads(path.read_text())
        read["compute"] = {int(n): _compute(speeds) for n, speeds in read["compute"].items()}
        curves = read.get("collectives", {})
        read["collectives"] = {name: _curve(curve) for name, curve in curves.items()}
        for key in ("memory_bytes", "server_rate", "link_rate", "overlap_slowdown"):
            if not read.get(key, 1.0) > 0:
                raise ValueError(f"{key}={read[key]}: must be greater than 0")
        if not (part_s := read.get("server_part_s", 0.0)) >= 0:
            raise ValueError(f"server_part_s={part_s}: must not be negative")
        return Machine(**read)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        where = f"{path}: is no machine file of this version: run `shoal calibrate` again"
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error


def _compute(read: dict[str, Any]) -> Compute:
    """Read the speeds of a rank: a curve for each object with points, else what is there."""
    values: dict[str, Any] = {
        name: _curve(value) if isinstance(value, dict) and "points" in value else value
        for name, value in read.items()
    }
    if any(not value >= 0 for value in values.get("overheads", {}).values()):
        raise ValueError("overheads: seconds must not be negative")
    return Compute(**values)


def _curve(read: dict[str, Any]) -> SpeedCurve:
    points = tuple(Point(*point) for point in read["points"])
    if not points or any(point.size <= 0 or point.value <= 0 for point in points):
        raise ValueError("sizes and values of a curve must be greater than 0")
    return SpeedCurve(points)


UNKNOWN_SERVER_RATE = 2e9
"""A ninth of the 18 GB/s that one core reads from memory: a server reads a gradient, adds it to the
sum, and reads and writes some six arrays to step."""


def flat(value: float) -> SpeedCurve:
    """Return a curve of one value at every size."""
    return SpeedCurve((Point(1.0, value),))


def _gpu(
    name: str,
    memory_gib: float,
    flops: float,
    float32_flops: float,
    bandwidth: float,
    link: float,
    efficiency: float,
) -> Machine:
    """Return a GPU from its datasheet.

    Args:
        flops: dense bf16 FLOP/s with tensor cores; those of TF32 are half as many.
        float32_flops: FLOP/s without tensor cores. torch multiplies matrices of float32 so by
            default, and lets convolutions use TF32.
        bandwidth: bytes/s of its memory.
        link: bytes/s to other GPUs of the host, one way.
        efficiency: share of the stated FLOP/s that large matrix products reach; small ones are
            bound by `op_s`.
    """
    speed = Compute(
        matmul=flat(flops * efficiency),
        conv=flat(flops * efficiency * 0.7),
        memory=flat(bandwidth * 0.8),
        forward_op_s=8e-6,
        backward_op_s=8e-6,
        step_op_s=2e-6,
        step_s=5e-4,
        float32={"matmul": float32_flops * FLOAT32_EFFICIENCY / (flops * efficiency), "conv": 0.5},
    )
    return Machine(
        name,
        "cuda",
        memory_gib * 2**30,
        calibrated=False,
        compute={1: speed},
        overlap_slowdown=1.13,
        server_rate=UNKNOWN_SERVER_RATE,
        link_rate=link,
        note=f"from the datasheet of {name}, not measured: {efficiency:.0%} of its peak in bf16",
    )


FLOAT32_EFFICIENCY = 0.8
"""Share of the stated FLOP/s without tensor cores that large products reach."""


PRESETS = {
    # NVIDIA A100 Tensor Core GPU datasheet (2022): 312 TFLOP/s bf16, 19.5 FP32, 2,039 GB/s, NVLink
    # 600 GB/s.
    "a100-80gb": _gpu("A100 80 GB SXM", 80, 312e12, 19.5e12, 2.039e12, 300e9, 0.6),
    "a100-40gb": _gpu("A100 40 GB SXM", 40, 312e12, 19.5e12, 1.555e12, 300e9, 0.6),
    # NVIDIA H100 Tensor Core GPU datasheet (2023): 989 TFLOP/s bf16 dense, 67 FP32, 3.35 TB/s, 900
    # GB/s.
    "h100": _gpu("H100 80 GB SXM", 80, 989e12, 67e12, 3.35e12, 450e9, 0.5),
    # NVIDIA H200 datasheet (2024): the same compute, 141 GB at 4.8 TB/s.
    "h200": _gpu("H200 141 GB SXM", 141 * 1e9 / 2**30, 989e12, 67e12, 4.8e12, 450e9, 0.5),
}
"""Machines by name. All numbers are of datasheets."""


def unknown_gpu(name: str, memory_bytes: float) -> Machine:
    """Return a GPU of which only the name and the memory are known."""
    gib = memory_bytes / 2**30
    return replace(
        _gpu(name, gib, 60e12, 15e12, 0.6e12, 12e9, 0.5),
        note="are guessed, of a GPU with 60 TFLOP/s in bf16; nothing is known of "
        f"{name} but its memory",
    )


UNKNOWN_CPU = Machine(
    "this machine",
    "cpu",
    float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    calibrated=False,
    compute={
        1: Compute(flat(50e9), flat(30e9), flat(10e9), 1.5e-5, 1e-5, 3e-6, 5e-4),
    },
    server_rate=UNKNOWN_SERVER_RATE,
    cores=os.cpu_count() or 1,
    note="are guessed, of a core with 50 GFLOP/s; `shoal calibrate` measures this machine",
)
"""A CPU of which nothing is known."""


def low_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """Return a low sample, and how far their median lies above it, relative to it.

    One of twelve is lower. Not the least: a virtual machine takes time that it did not have off a
    later sample, which is too short then, down to 0.
    """
    ordered = sorted(samples)
    low = ordered[len(ordered) // 12]
    return low, ordered[len(ordered) // 2] / low - 1
