"""How far what was found is from the reference, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

ABSOLUTE_FLOOR = 1e-5
"""Share of the model's largest entry below which an entry counts as rounding."""

Tensors = Mapping[str, Tensor | None]


def differences(expected: Tensors, given: Tensors) -> dict[str, float]:
    """Largest difference of each tensor, relative to its own largest entry; infinite where one is
    missing.

    Some gradients are zero but for rounding, such as that of a bias of attention's keys, which
    softmax takes out again. They count as at least ZERO times the largest gradient of the model.
    """
    sizes = {name: _size(tensor) for name, tensor in expected.items() if tensor is not None}
    floor = ABSOLUTE_FLOOR * max(sizes.values(), default=1.0)
    return {
        name: _difference(tensor, given.get(name), max(sizes.get(name, 0.0), floor))
        for name, tensor in expected.items()
    }


def _size(tensor: Tensor) -> float:
    """The largest finite entry: the minus infinities of a mask measure nothing. 0 where there
    is none.
    """
    return _largest(_numbers(tensor).abs().masked_fill_(~tensor.isfinite(), 0))


def _difference(expected: Tensor | None, given: Tensor | None, size: float) -> float:
    if expected is None or given is None:
        return 0.0 if expected is None and given is None else float("inf")
    if expected.shape != given.shape:
        return float("inf")
    difference = (_numbers(expected) - _numbers(given)).abs()
    largest = _largest(
        difference.masked_fill_(expected == given, 0)
    )  # of equal infinities it is NaN
    if size == 0.0:
        return float("inf") if largest else 0.0
    return largest / size


def _numbers(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _largest(magnitudes: Tensor) -> float:
    return magnitudes.max().item() if magnitudes.numel() else 0.0
