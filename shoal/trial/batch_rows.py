"""Any rows of a batch, which is a nest of tensors, arrays and lists with one entry per sample."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.tree_map import tensors_in
from shoal.trial.loss_verdict import CannotTry

_WITHOUT_ROWS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def take_rows(value: Any, rows: Tensor, num_samples: int) -> Any:
    """Return the samples `rows` of a nest, copied.

    0-dimensional tensors, numbers and texts belong to all samples and stay as they are. A list with
    one entry per sample gives some of its entries, and nothing inside of them is looked at.

    Args: rows: (m,) int64, on the CPU.

    Raises: CannotTry: something has no rows that can be told.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return _rows_of_array(value, rows, num_samples)
    if _has_entry_per_sample(value, num_samples):
        return type(value)(value[row] for row in rows.tolist())
    if isinstance(value, _WITHOUT_ROWS):
        return value
    return map_nest(value, lambda item: take_rows(item, rows, num_samples))


def choose_rows(batch: Any, num_samples: int, most: int) -> Tensor:
    """Return rows that are to stand for a batch, in order: (m,) int64, m at most `most`.

    They are spread over the batch. Where an integer tensor has negative numbers, which often mark
    what a loss leaves out, up to half of them are rows with its lowest number.
    """
    if num_samples <= most:
        return torch.arange(num_samples)
    marked: list[int] = []
    for tensor in tensors_in(batch):
        if tensor.dtype in (torch.int64, torch.int32) and tensor.shape[:1] == (num_samples,):
            lowest = tensor.min()
            if lowest < 0:
                has_lowest = (tensor == lowest).reshape(num_samples, -1).any(1)
                marked += has_lowest.nonzero().flatten().tolist()
    chosen = dict.fromkeys(marked[:: max(1, 2 * len(marked) // most)][: most // 2])
    for step in range(most):
        chosen.setdefault(step * num_samples // most)
    return torch.tensor(sorted(list(chosen)[:most]))


def count_rows(values: Iterable[Any]) -> int:
    """Return the samples of a batch whose columns are `values`; 0 if nothing tells.

    The first tensor tells by dimension 0, a list of anything but tensors of one length by its own.
    """
    for value in values:
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
            return len(value)
        if type(value) is list and value:
            lengths = {len(v) if isinstance(v, Tensor) and v.dim() else None for v in value}
            length = lengths.pop()
            return len(value) if lengths or length is None else length
        items = value.values() if isinstance(value, Mapping) else value
        if isinstance(items, Iterable) and not isinstance(items, (str, bytes, Tensor, np.ndarray)):
            found = count_rows(items)
            if found:
                return found
    return 0


def map_nest(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same class with `function` applied to its items.

    Raises: CannotTry: it is no container that is known.
    """
    if isinstance(value, dict) and type(value) is not dict:
        # A copy keeps what the class holds beside its items, such as attributes of a ModelOutput.
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = function(item)
        return changed
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: function(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changes)
    raise CannotTry(f"a {type(value).__name__}, which cannot be cut into parts")


def _rows_of_array(value: Any, rows: Tensor, num_samples: int) -> Any:
    if not value.ndim:
        return value
    if value.shape[0] != num_samples:
        raise CannotTry(f"a tensor of shape {tuple(value.shape)} beside {num_samples} samples")
    if isinstance(value, np.ndarray):
        return value[rows.numpy()]
    if value.is_nested or value.layout is not torch.strided:
        raise CannotTry("a nested or sparse tensor, which cannot be cut into parts")
    return value.detach()[rows.to(value.device)].requires_grad_(value.requires_grad)


def _has_entry_per_sample(value: Any, num_samples: int) -> bool:
    """Return True for a list of samples, False for a list of columns.

    A tuple is a list of samples only if it holds texts or numbers, as collated texts do.
    """
    if type(value) not in (list, tuple) or len(value) != num_samples:
        return False
    if type(value) is tuple:
        return all(isinstance(item, (str, bytes, int, float)) for item in value)
    return not all(
        isinstance(item, Tensor) and item.dim() and item.shape[0] == num_samples for item in value
    )
