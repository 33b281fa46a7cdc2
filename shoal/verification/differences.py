"""Relative differences between two sets of tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

ABSOLUTE_FLOOR = 1e-5
"""Fraction of the largest entry of all tensors. Tensors with smaller entries count as rounding."""

Tensors = Mapping[str, Tensor | None]


def differences(expected: Tensors, given: Tensors) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to the tensor's largest entry.

    It is infinite where one of the two is missing or has another shape.

    Some gradients are zero except for rounding, such as that of the bias of attention's keys, which
    cancels in the softmax. So a tensor's largest entry counts as at least `ABSOLUTE_FLOOR` times
    the largest entry of all tensors.
    """
    sizes = {name: _size(tensor) for name, tensor in expected.items() if tensor is not None}
    floor = ABSOLUTE_FLOOR * max(sizes.values(), default=1.0)
    return {
        name: _difference(tensor, given.get(name), max(sizes.get(name, 0.0), floor))
        for name, tensor in expected.items()
    }


def _size(tensor: Tensor) -> float:
    """Return the largest finite magnitude; 0 where there is none.

    Infinite entries, such as those of an attention mask, do not count.
    """
    return _max(_as_float(tensor).abs().masked_fill_(~tensor.isfinite(), 0))


def _difference(expected: Tensor | None, given: Tensor | None, size: float) -> float:
    if expected is None or given is None:
        return 0.0 if expected is None and given is None else float("inf")
    if expected.shape != given.shape:
        return float("inf")
    difference = (_as_float(expected) - _as_float(given)).abs()
    # Equal infinities have the difference NaN.
    largest = _max(difference.masked_fill_(expected == given, 0))
    if size == 0.0:
        return float("inf") if largest else 0.0
    return largest / size


def _as_float(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _max(magnitudes: Tensor) -> float:
    return magnitudes.max().item() if magnitudes.numel() else 0.0
