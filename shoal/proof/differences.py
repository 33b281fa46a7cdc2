"""How far what was found is from the reference, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

ZERO = 1e-5
"""Share of the model's largest entry below which an entry counts as rounding."""

Tensors = Mapping[str, Tensor | None]


def differences(expected: Tensors, given: Tensors) -> dict[str, float]:
    """Largest difference of each tensor, relative to its own largest entry; infinite where one is missing.

    Some gradients are zero but for rounding, such as that of a bias of attention's keys, which softmax takes out again.
    They count as at least ZERO times the largest gradient of the model.
    """
    sizes = {name: tensor.abs().max().item() for name, tensor in expected.items() if tensor is not None}
    floor = ZERO * max(sizes.values(), default=1.0)
    return {
        name: _difference(tensor, given.get(name), max(sizes.get(name, 0.0), floor))
        for name, tensor in expected.items()
    }


def _difference(expected: Tensor | None, given: Tensor | None, size: float) -> float:
    if expected is None or given is None:
        return 0.0 if expected is None and given is None else float("inf")
    if expected.shape != given.shape:
        return float("inf")
    return (expected - given).abs().max().item() / size
