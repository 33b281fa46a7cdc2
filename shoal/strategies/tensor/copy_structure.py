"""Inputs for a forward pass beside the real one: what it writes into them, a cache say, the
other never sees.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


def copy_without_tensors(nest: Any) -> Any:
    """Copies of all objects in a nest, around the same tensors; the nest itself where an object
    cannot be copied.
    """
    try:
        with _ShareTensorsOnDeepcopy():
            return deepcopy(nest)
    except Exception:  # noqa: BLE001 - whatever an object may say to being copied
        return nest


class _ShareTensorsOnDeepcopy(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
