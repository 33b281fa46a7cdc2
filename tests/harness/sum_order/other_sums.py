"""Another order of sums on the CPU: what the kernels of another processor do, and deterministic.

    a matrix product, a convolution, a sum      two halves of what is summed, then their sum
    a norm, a softmax, a loss over rows         the elements from the last to the first

With SHOAL_TEST_SUMS=wide they add float32 in float64 instead: what kernels do that lose less.

The kernels of ATen are replaced below autograd, so backward passes and other threads have them too.
No result changes by more than rounding. A test that passes only with the usual sums has a number
in it that belongs to the processor on which it was written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

VARIABLE = "SHOAL_TEST_SUMS"
Kernel = Callable[..., Any]
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_library: list[torch.library.Library] = []


def replace_kernels() -> None:
    """Replace the kernels in this process and in those that it forks."""
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
        is_wide = os.environ.get(VARIABLE) == "wide"
        for name, make in KERNELS.items():
            original = _kernel(name)
            library.impl(name, _wide(original) if is_wide else make(original), "CPU")


def _kernel(name: str) -> Kernel:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    return lambda *args, **more: kernel.call_boxed(CPU, *args, **more)


def _wide(original: Kernel) -> Kernel:
    """Return the kernel with float32 arguments, and none of any other precision, in float64."""

    def wide(*args: Any, **more: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        if not any(value.dtype is torch.float32 for value in tensors) or "dtype" in more:
            return original(*args, **more)
        found = original(*tree_map_only(Tensor, _to_float64, args), **more)
        return tree_map_only(Tensor, _to_float32, found)

    return wide


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _halves(tensor: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    size = tensor.shape[dimension]
    half = size // 2
    return tensor.narrow(dimension, 0, half), tensor.narrow(dimension, half, size - half)


def _product(original: Kernel) -> Kernel:
    """aten::mm and aten::bmm."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        if left.shape[-1] < 2:
            return original(left, right)
        (a, b), (c, d) = _halves(left, -1), _halves(right, -2)
        return original(a, c).add_(original(b, d))

    return product


def _added_product(original: Kernel) -> Kernel:
    """aten::addmm and aten::baddbmm."""

    def added(addend: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if left.shape[-1] < 2:
            return original(addend, left, right, beta=beta, alpha=alpha)
        (a, b), (c, d) = _halves(left, -1), _halves(right, -2)
        first = original(addend, a, c, beta=beta, alpha=alpha)
        return original(first, b, d, beta=1, alpha=alpha)

    return added


def _dot(original: Kernel) -> Kernel:
    def dot(left: Tensor, right: Tensor) -> Tensor:
        (a, b), (c, d) = _halves(left, 0), _halves(right, 0)
        return original(a, c) + original(b, d)

    return dot


def _convolution(original: Kernel) -> Kernel:
    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        transposed, groups = rest[3], rest[5]
        if transposed or groups != 1 or x.shape[1] < 2:
            return original(x, weight, bias, *rest)
        (a, b), (c, d) = _halves(x, 1), _halves(weight, 1)
        return original(a, c, bias, *rest).add_(original(b, d, None, *rest))

    return convolution


def _convolution_backward(original: Kernel) -> Kernel:
    """The gradients of the weight and the bias are sums over samples: two halves of them."""

    def backward(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        if len(x) < 2:
            return original(gradient, x, weight, *rest)
        (a, b), (c, d) = _halves(gradient, 0), _halves(x, 0)
        first, second = original(a, c, weight, *rest), original(b, d, weight, *rest)
        of_x = None if first[0] is None else torch.cat([first[0], second[0]])
        of_weights = [
            None if one is None else one + other
            for one, other in zip(first[1:], second[1:], strict=True)
        ]
        return (of_x, *of_weights)

    return backward


def _sum(original: Kernel) -> Kernel:
    def total(x: Tensor, **dtype: Any) -> Tensor:
        if x.numel() < 2 or not x.is_floating_point():
            return original(x, **dtype)
        a, b = _halves(x.reshape(-1), 0)
        return original(a, **dtype) + original(b, **dtype)

    return total


def _sum_along(original: Kernel) -> Kernel:
    def total(x: Tensor, dims: Any = None, keepdim: bool = False, **dtype: Any) -> Tensor:
        along = range(x.dim()) if not dims else [d % x.dim() for d in dims] if x.dim() else []
        longest = max(along, key=lambda d: x.shape[d], default=None)
        if longest is None or x.shape[longest] < 2 or not x.is_floating_point():
            return original(x, dims, keepdim, **dtype)
        a, b = _halves(x, longest)
        return original(a, dims, keepdim, **dtype) + original(b, dims, keepdim, **dtype)

    return total


def _from_the_end(*tensors: int, dimension: int = 0, results: tuple[int, ...] = ()) -> Any:
    """Return a maker of kernels that flips arguments, and those results that have their elements.

    Args:
        tensors: numbers of the arguments.
        dimension: along which they are flipped.
        results: numbers of the results to flip back; all where there is one result only.
    """

    def make(original: Kernel) -> Kernel:
        def flipped(*args: Any) -> Any:
            values = list(args)
            if values[tensors[0]].dim() == 0:
                return original(*args)
            for number in tensors:
                if values[number] is not None:
                    values[number] = values[number].flip(dimension)
            found = original(*values)
            if isinstance(found, Tensor):
                return found.flip(dimension) if results else found
            return tuple(
                value.flip(dimension) if number in results and value is not None else value
                for number, value in enumerate(found)
            )

        return flipped

    return make


def _nll_loss(original: Kernel) -> Kernel:
    flipped = _from_the_end(0, 1)(original)

    def nll_loss(
        x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, *rest: Any
    ) -> Any:
        # Without a reduction nothing is summed, and each row has a result of its own.
        kernel = flipped if reduction else original
        return kernel(x, target, weight, reduction, *rest)

    return nll_loss


def _softmax(original: Kernel) -> Kernel:
    def softmax(x: Tensor, dimension: int, half_to_float: bool) -> Tensor:
        if x.dim() == 0:
            return original(x, dimension, half_to_float)
        return original(x.flip(dimension), dimension, half_to_float).flip(dimension)

    return softmax


KERNELS: dict[str, Callable[[Kernel], Kernel]] = {
    "mm": _product,
    "bmm": _product,
    "addmm": _added_product,
    "baddbmm": _added_product,
    "dot": _dot,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "sum": _sum,
    "sum.dim_IntList": _sum_along,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "native_batch_norm": _from_the_end(0, results=(0,)),
    "native_batch_norm_backward": _from_the_end(0, 1, results=(0,)),
    "embedding_dense_backward": _from_the_end(0, 1),
    "nll_loss_forward": _nll_loss,
}
