"""Functions of torch that compute in float64 where a script means float32.

    F.linear(x, weight)         float32 arguments are given to it as float64
    torch.zeros(3)              float64, for that is the default now
    x.float(), x.to(float32)    float64
    weight.grad, p.add_(x)      left as they are: a copy must not be written, and has no gradient

Weights stay as they are, whoever holds them; their gradients come back through the conversion.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.data.tree_map import tree_map

_DTYPE: Any = Tensor.dtype
_OF_THIS_TENSOR = ("__get__", "backward", "grad", "register_hook", "retain_grad")


class Float64Functions(TorchFunctionMode):
    """Inside, each function of torch that is given float32 tensors is given float64 ones.

    It may be entered again inside of itself, as recomputing a layer does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._defaults: list[torch.dtype] = []

    def __enter__(self) -> Self:
        self._defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._defaults.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Layers compare the dtype of their weights with that of their input.
        if func == _DTYPE.__get__:
            return promoted(func(*args))
        if _needs_these_tensors(func, kwargs):
            return func(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.double
        return func(*promoted(args), **promoted(kwargs))


def promoted(value: Any) -> Any:
    """Return a nest in which float32 tensors, and the dtype itself, are float64."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    if value is torch.float32:
        return torch.float64
    # Exactly these types: a torch.Size has no tensors.
    return tree_map(value, promoted) if type(value) in (tuple, list, dict) else value


def _needs_these_tensors(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if a function writes into an argument, or asks for its place in the graph."""
    name: str = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    special = name.startswith("__i") or name in ("__setitem__", "__set__", "__delete__")
    return in_place or special or "out" in kwargs or name in _OF_THIS_TENSOR
