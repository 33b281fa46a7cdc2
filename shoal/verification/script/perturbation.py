"""How far rounding moves each tensor: one process again, from weights moved by a rounding unit.

    reference        weights w            outputs, gradients, new weights
    perturbed run    w (1 + u), |u| = eps other outputs, ...              the distance is rounding

eps is the rounding unit of the coarsest dtype that the modules compute in. The idea is that of
TTrace (Jiang et al., arXiv:2506.09280). Weights are put back before the optimizer steps, so that
they move only by what their gradients do.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from shoal.comm.norm import to_local
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.run_record import read_run, tensors_of_step
from shoal.verification.script.step_comparison import RecordedRun, StepComparison
from shoal.verification.script.tolerances import Tolerances

RUNS = 3
"""Perturbed runs, each with random signs of its own."""
FACTOR = 3.0
"""A difference of so many times the largest movement is no rounding."""
WEIGHT_UNITS = 8.0
"""Rounding units of a weight by which its update may differ at least."""


class Perturbation:
    """Moves the weights of a model by one rounding unit for the passes of each step.

    Args: eps: the rounding unit. seed: of the signs.
    """

    def __init__(self, eps: float, seed: int) -> None:
        self._eps = eps
        self._generator = torch.Generator().manual_seed(seed)
        self._saved: list[tuple[Tensor, Tensor]] = []

    def begin(self, names: ModelNames) -> None:
        """Move the weights."""
        if self._saved:
            return
        with torch.no_grad():
            for _, parameter in names.parameters():
                own = to_local(parameter.data)
                self._saved.append((own, own.clone()))
                signs = torch.randint(0, 2, own.shape, generator=self._generator) * 2 - 1
                own.mul_(1 + self._eps * signs.to(own.device, own.dtype))

    def end(self) -> None:
        """Put the weights back."""
        with torch.no_grad():
            for own, value in self._saved:
                own.copy_(value)
        self._saved = []


def rounding_unit(folder: Path, kind: str) -> float:
    """Return the rounding unit of the coarsest dtype in the first step of a record.

    Args: kind: "forward" for outputs, "weight" for weights.
    """
    tensors = tensors_of_step(folder, 0, 1).below(kind).values()
    units = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()]
    return max(units, default=torch.finfo(torch.float32).eps)


def measured(
    reference: Path, perturbed: Iterable[Path], floor: float, weight_floor: float
) -> Tolerances:
    """Return a tolerance for each tensor, from how far perturbed runs lie from the reference.

    Args:
        reference, perturbed: records of one process.
        floor, weight_floor: of outputs and gradients, and of weights.
    """
    one = RecordedRun(reference, read_run(reference))
    found: dict[int, dict[str, float]] = {}
    for folder in perturbed:
        other = RecordedRun(folder, read_run(folder))
        for number in range(1, min(one.steps, other.steps) + 1):
            step = StepComparison(one, other, number, Tolerances(0.0))
            step.compare()
            errors = found.setdefault(number, {})
            for name, error in step.errors.items():
                errors[name] = max(errors.get(name, 0.0), FACTOR * error)
    return Tolerances(floor, found, weight_floor)
