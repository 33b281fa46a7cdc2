"""Places where a script keeps values from call to call: attributes, entries of dicts, closures.

They are found through its function: what it closes over, the globals that it names, the object that
it is a method of, the models, and what these hold, a few levels deep.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from shoal.trial.saved_objects import global_names

DEPTH = 3
_LIBRARIES = ("torch", "shoal", "numpy")
_LEFT_ALONE = (Tensor, Optimizer, DataLoader, Dataset, ModuleType, type)


class Place(NamedTuple):
    """A key of a dict, such as the attributes of an object; or a cell of a closure.

    Attributes: name: for messages.
    """

    holder: Any
    key: Any
    name: str

    def read(self) -> Any:
        """Return what is there; None if there is nothing."""
        if not isinstance(self.holder, CellType):
            return self.holder.get(self.key)
        try:
            return self.holder.cell_contents
        except ValueError:  # nothing was assigned yet
            return None

    def write(self, value: Any) -> None:
        """Put a value there."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


def places_of(function: Any, models: Sequence[nn.Module]) -> Iterator[Place]:
    """Yield the places that a function can reach: models, closure, globals, `self`."""
    seen: set[int] = set()
    for model in models:
        yield from _in_object(model, DEPTH, seen)
    yield from _in_object(inspect.unwrap(function), DEPTH, seen)


def _in_object(value: Any, depth: int, seen: set[int]) -> Iterator[Place]:
    if depth < 0 or id(value) in seen or isinstance(value, _LEFT_ALONE):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for module in value.modules():
            seen.add(id(module))
            name, table = type(module).__name__, vars(module)
            if _is_of_library(type(module)):  # a strategy may write into it, such as a momentum
                continue
            yield from (Place(table, key, f"{name}.{key}") for key in list(table))
    elif isinstance(value, functools.partial):
        for each in (value.func, *value.args, *value.keywords.values()):
            yield from _in_object(each, depth, seen)
    elif isinstance(value, MethodType):
        yield from _in_object(value.__self__, depth, seen)
        yield from _in_object(value.__func__, depth, seen)
    elif isinstance(value, FunctionType):
        yield from _in_function(value, depth, seen)
    elif isinstance(value, dict):
        yield from _in_dict(value, "[...]", depth, seen)
    elif hasattr(value, "__dict__") and not _is_of_library(type(value)):
        yield from _in_dict(vars(value), f"{type(value).__name__}.", depth, seen)


def _in_dict(value: dict[Any, Any], prefix: str, depth: int, seen: set[int]) -> Iterator[Place]:
    for key, entry in list(value.items()):
        yield Place(value, key, f"{prefix}{key}")
        yield from _in_object(entry, depth - 1, seen)


def _in_function(function: FunctionType, depth: int, seen: set[int]) -> Iterator[Place]:
    if _is_of_library(function):
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        yield Place(cell, None, name)
        try:
            yield from _in_object(cell.cell_contents, depth - 1, seen)
        except ValueError:  # nothing was assigned yet
            continue
    table = function.__globals__
    for name in set(global_names(function.__code__)) & table.keys():
        yield Place(table, name, name)
        yield from _in_object(table[name], depth - 1, seen)


def _is_of_library(definition: Any) -> bool:
    """Return whether a class or a function is torch's, NumPy's or Shoal's own."""
    return definition.__module__.split(".")[0] in _LIBRARIES
