"""Ranks of a calibration that measure a few small points."""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.planner import calibration, operation_speeds

NETWORKS = (partial(operation_speeds.tiny_blocks, 2),)


def measure_few_points() -> dict[str, Any]:
    """Return what a rank of `shoal calibrate` measures. Collective."""
    operation_speeds.BUDGET_S = 0.001
    operation_speeds.NETWORKS = calibration.NETWORKS = NETWORKS
    (calibration.REFERENCE,) = NETWORKS
    operation_speeds.MATMUL_SIDES = (16, 32)  # type: ignore[assignment]
    operation_speeds.CONV_SHAPES = operation_speeds.CONV_SHAPES[:1]  # type: ignore[assignment]
    operation_speeds.MEMORY_BYTES = 1 << 14
    calibration.COLLECTIVE_BYTES = (1 << 10, 1 << 14)  # type: ignore[assignment]
    return MEASURE_RANK()


MEASURE_RANK = calibration._measure_rank
