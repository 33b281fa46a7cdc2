"""Map over batches, which are nests of tensors: tuples, lists, named tuples and mappings.

torch's pytree treats an unregistered class of mapping or list as one leaf: the UserDict that
tokenizers return, a mappingproxy, a user's own list class. Here all of these are nests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tree_map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container like `value` with `function` applied to its items; return other values
    unchanged.
    """
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in([*value.values()])


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a nest with its floating point tensors converted to `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return tree_map(value, lambda item: in_dtype(item, dtype))
