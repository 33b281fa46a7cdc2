"""How far rounding moves each tensor: one process again, from weights moved by a rounding unit.

    reference        weights w            outputs, gradients, new weights
    perturbed run    w (1 + u), |u| = eps other outputs, ...              the distance is rounding

eps is the rounding unit of the coarsest dtype that the modules compute in; for the weights of an
embedding or a norm, which autocast leaves in float32, that of what it returns. The idea is that of
TTrace (Jiang et al., arXiv:2506.09280). Weights are put back before the optimizer steps, so that
they move only by what their gradients do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shoal.comm.norm import to_local
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.run_record import read_run, tensors_of_step
from shoal.verification.script.step_comparison import RecordedRun, StepComparison, Tolerances

RUNS = 3
"""Perturbed runs, each with random signs of its own."""
FACTOR = 3.0
"""A difference of so many times the largest movement is no rounding."""
WEIGHT_UNITS = 8.0
"""Rounding units of a weight by which its update may differ at least."""
EMBEDDINGS = ("Embedding", "EmbeddingBag")
ELEMENTWISE = (
    *EMBEDDINGS,
    *("LayerNorm", "RMSNorm", "GroupNorm"),
    *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"),
)
"""Classes of modules that compute in the dtype that they return."""


class Perturbation:
    """Moves the weights of a model by one rounding unit for the passes of each step.

    Args:
        eps: the rounding unit.
        seed: of the signs.
        own: name of a module -> the rounding unit of its own weights, where it is another.
    """

    def __init__(self, eps: float, seed: int, own: Mapping[str, float]) -> None:
        self._eps = eps
        self._own = own
        self._generator = torch.Generator().manual_seed(seed)
        self._saved: list[tuple[Tensor, Tensor]] = []

    def begin(self, names: ModelNames) -> None:
        """Move the weights."""
        if self._saved:
            return
        with torch.no_grad():
            for name, parameter in names.parameters():
                eps = self._own.get(name.rpartition(".")[0], self._eps)
                own = to_local(parameter.data)
                self._saved.append((own, own.clone()))
                signs = torch.randint(0, 2, own.shape, generator=self._generator) * 2 - 1
                own.mul_(1 + eps * signs.to(own.device, own.dtype))

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


def units_of_modules(folder: Path) -> dict[str, float]:
    """Return the rounding units of embeddings and norms: of the dtypes of what they return."""
    tensors = tensors_of_step(folder, 0, 1)
    units: dict[str, float] = {}
    for index, call in enumerate(read_run(folder)[0].steps[0].calls):
        name = f"forward/{index}/0"
        if call.kind in ELEMENTWISE and name in tensors:
            unit = torch.finfo(tensors[name].dtype).eps
            units[call.module] = max(unit, units.get(call.module, 0.0))
    return units


def perturbation(reference: Path, seed: int) -> Perturbation:
    """Return a perturbation by the rounding units of a record of one process."""
    return Perturbation(rounding_unit(reference, "forward"), seed, units_of_modules(reference))


def measured(reference: Path, perturbed: Iterable[Path], tolerance: float = 0.0) -> Tolerances:
    """Return a tolerance for each tensor, from how far perturbed runs lie from the reference.

    Args:
        reference, perturbed: records of one process.
        tolerance: the smallest one.
    """
    one = RecordedRun(reference, read_run(reference))
    units = units_of_modules(reference)
    default = max(rounding_unit(reference, "forward"), tolerance)
    of_weights = max(WEIGHT_UNITS * rounding_unit(reference, "weight"), tolerance)
    found: dict[int, dict[str, float]] = {}
    for folder in perturbed:
        other = RecordedRun(folder, read_run(folder))
        for number in range(1, min(one.steps, other.steps) + 1):
            step = StepComparison(one, other, number, Tolerances(0.0))
            step.compare()
            least = {name: of_weights for name in step.errors if name.startswith("weight/")}
            least |= {
                f"forward/{index}/0": max(WEIGHT_UNITS * units[call.module], tolerance)
                for index, call in enumerate(step.calls)
                if call.kind in EMBEDDINGS and call.module in units
            }
            errors = found.setdefault(number, {"files": of_weights})
            for name, error in step.errors.items():
                known = errors.get(name, least.get(name, default))
                errors[name] = max(known, FACTOR * error)
    return Tolerances(default, found)
