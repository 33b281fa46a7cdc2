"""An input of attention that looks as narrow as this rank's heads.

Scripts take the width of all heads from their input, and cut it into heads:

      B, T, C = x.size()
      q = q.view(B, T, self.n_head, C // self.n_head)

The layers for q, k and v need all of x, but their outputs on a rank have C / size columns. So x is
wrapped: its shape says C / size, and each function that is called on it gets the full tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.pytree import tree_map_only
from shoal.platform.torch_private.subclasses import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
)

SHAPE_FUNCTIONS = {Tensor.size, Tensor.numel, Tensor.shape.__get__}  # type: ignore[attr-defined]


class NarrowedInput(Tensor):
    """A tensor with the shape (..., C / size) whose values are those of `full`, (..., C).

    Attributes:
        full: the tensor that all functions get.
    """

    full: Tensor

    @classmethod
    def of(cls, full: Tensor, size: int) -> NarrowedInput:
        """Wrap `full`; `size` divides its last dimension."""
        made: Any = _Narrow.apply(full, size)
        made.full = full
        narrowed: NarrowedInput = made
        return narrowed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SHAPE_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*full_inputs(args), **full_inputs(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*full_inputs(args), **full_inputs(kwargs or {}))


class _Narrow(torch.autograd.Function):
    """The wrapper. Functions get `full` instead of it, so no gradient may arrive here."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, size: int) -> Any:
        shape = (*full.shape[:-1], full.shape[-1] // size)
        return make_wrapper_subclass(NarrowedInput, shape, dtype=full.dtype, device=full.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise StrategyRefused(
            "tensor: an autograd.Function takes the input of attention that is divided between "
            "heads, and takes its width from it. Keep the attention whole: see the strategy's "
            "option `whole`."
        )


def narrowed_inputs(nest: Any, width: int, size: int) -> Any:
    """Return a nest whose tensors with a last dimension of `width` are wrapped."""

    def narrow(tensor: Tensor) -> Tensor:
        is_input = tensor.dim() > 1 and tensor.shape[-1] == width and tensor.is_floating_point()
        return NarrowedInput.of(tensor, size) if is_input else tensor

    return tree_map_only(Tensor, narrow, nest)


def full_inputs(nest: Any) -> Any:
    """Return a nest whose narrowed inputs are replaced by the full tensors."""
    return tree_map_only(NarrowedInput, lambda narrowed: narrowed.full, nest)
