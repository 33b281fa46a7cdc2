"""Any rows of a batch, which is a nest of tensors, arrays and lists with one entry per sample."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
