"""Torch functions on absent tensors: computed on the meta device, where only shapes are.

y = x * mask       x is absent, mask follows from the batch      y is absent: x's meta * meta
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.data.tree_map import SPARSE
from shoal.platform.torch_private.pytree import tree_map
from shoal.strategies.pipeline.absent import (
    AbsentTensor,
    WalkRefusal,
    absent_of,
    mark_absent,
    tensors_in,
)

VALUE_FUNCTIONS = frozenset(
    (
        *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"),
        *("__complex__", "__contains__", "__array__", "equal", "allclose", "is_nonzero"),
    )
)
"""Names of functions that look at values."""
_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
_NOT_IN_PLACE = ("__invert__", "__index__", "__int__", "__init__", "__iter__")


def written_target(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a function writes into; None if it makes a new one."""
    is_operator = label.startswith("__i") and label not in _NOT_IN_PLACE
    is_method = label.endswith("_") and not label.endswith("__")
    target = args[0] if args and (is_operator or is_method or label == "__setitem__") else None
    target = kwargs.get("out") if target is None else target
    return target if isinstance(target, Tensor) else None


def call_on_meta(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make_absent: Callable[[Tensor, torch.device], AbsentTensor],
    device: torch.device,
) -> Any:
    """Call a torch function of which at least one argument is absent.

    Args:
        make_absent: (meta tensor, device) -> an absent tensor.
        device: of results whose arguments do not tell it.

    Returns: the results, absent tensors for tensors. An argument that is returned stays itself.

    Raises: WalkRefusal: the function needs values.
    """
    label = getattr(func, "__name__", "")
    stand_ins = _StandIns(label)
    held = (x for x in tensors_in((args, kwargs)) if absent_of(x) is not None or not x.is_meta)
    device_of_results = next((x.device for x in held), device)
    target = written_target(label, args, kwargs)
    func, args, kwargs = _without_values(func, label, args, kwargs)
    try:
        with torch.no_grad():
            out = func(*tree_map(stand_ins.of, args), **tree_map(stand_ins.of, kwargs))
    except Exception as error:  # whatever a kernel raises where it has no values
        raise WalkRefusal(
            f"pipeline: {label}() of a value that another rank computes needs the value itself: "
            f"{(str(error).splitlines() or [''])[0]}. Move the code that does so into a block."
        ) from error

    def to_absent(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        argument = stand_ins.absent_argument(value)
        return make_absent(value, device_of_results) if argument is None else argument

    if target is not None and absent_of(target) is None:  # written into a real tensor
        if not target.is_meta:
            mark_absent(target, make_absent(target.detach().to("meta"), target.device))
        return None if out is None else target
    return tree_map(to_absent, out)


class _StandIns:
    """Meta tensors in the place of the arguments of one call."""

    def __init__(self, label: str) -> None:
        self._moves = label in ("to", "type")
        self._arguments: dict[int, Tensor] = {}  # id of a meta tensor -> the argument

    def of(self, value: Any) -> Any:
        """Return the meta tensor for a tensor, and "meta" for a device."""
        if isinstance(value, Tensor):
            absent = absent_of(value)
            meta = _meta_of(value) if absent is None else absent.meta
            self._arguments[id(meta)] = value
            return meta
        is_name = self._moves and isinstance(value, str) and value.split(":")[0] in _DEVICE_TYPES
        return torch.device("meta") if isinstance(value, torch.device) or is_name else value

    def absent_argument(self, result: Tensor) -> Tensor | None:
        """Return the absent argument that a function has returned itself; None for a new tensor."""
        argument = self._arguments.get(id(result))
        return None if argument is None or absent_of(argument) is None else argument


def _meta_of(value: Tensor) -> Tensor:
    """Return a dense tensor without memory: sparse ones have no functions on the meta device."""
    if value.layout in SPARSE:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.detach().to("meta")


def _without_values(
    func: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call that does on meta what `func` does, where `func` itself would not."""
    if label == "where":  # torch would make tensors of its numbers on the CPU
        args = tuple(x if isinstance(x, Tensor) else torch.tensor(x, device="meta") for x in args)
    if label in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        args = (args[0], tuple(_indices(index)), *args[2:])
    if label == "_sparse_mm":  # of a graph that is at hand, for which a dense tensor stands
        return torch.mm, args[:2], {}
    if label in ("cpu", "cuda"):  # a copy on another device is a copy on meta
        return Tensor.clone, args[:1], {}
    return func, args, kwargs


def _indices(index: tuple[Any, ...]) -> Iterator[Any]:
    """Replace masks that are at hand by numbers of positions, so that the shape follows."""
    for item in index:
        if isinstance(item, Tensor) and item.dtype == torch.bool and absent_of(item) is None:
            yield from item.nonzero(as_tuple=True)
        else:
            yield item
