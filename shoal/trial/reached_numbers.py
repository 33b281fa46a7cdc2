"""Numbers of the script that a loss can read or write: Python's and small tensors, by their names.

    k = 0.0                                 a number of the script, which the loop changes

    def compute_loss(x, z):
        return real(x) - k * fake(z)        reached: k

They are found in the closure of a function, in the globals that it names, in the object that it is
a method of, and in what these hold, a few levels deep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.tensor_digest import tensor_digest
from shoal.trial.untouched import (
    LARGEST_COPY,
    LEFT_ALONE,
    global_names,
    is_of_library,
    is_of_machinery,
)

DEPTH = 4
MOST_ENTRIES = 64
"""Entries of the longest container whose entries are looked at."""
Entry = tuple[str, Any, Callable[[Any], object]]
"""A name, a value, and what puts another one in its place."""


class ReachedNumber(NamedTuple):
    """A number, or a small tensor, that a function can read."""

    value: Any
    replace: Callable[[Any], object]

    def digest(self) -> str:
        """Return a text that is the same where the value is."""
        is_tensor = isinstance(self.value, Tensor)
        return repr(int(tensor_digest(self.value)) if is_tensor else self.value)

    @property
    def is_real(self) -> bool:
        """Return True for floats, which a slightly different value may stand for."""
        is_tensor = isinstance(self.value, Tensor)
        return self.value.is_floating_point() if is_tensor else isinstance(self.value, float)

    def change(self) -> None:
        """Put another value in its place."""
        self.replace(self.value * 1.25 + 0.01)


def reached_numbers(
    function: Any, models: Iterable[nn.Module], num_samples: int
) -> dict[str, ReachedNumber]:
    """Return the numbers of the script that a function can read, by their names.

    Models, tensors with a gradient, and tensors with a dimension of `num_samples`, which are of the
    batch, are left out.
    """
    seen = {id(module) for model in models for module in model.modules()}
    found: dict[str, ReachedNumber] = {}

    def visit(entry: Entry, depth: int) -> None:
        name, value, replace = entry
        if isinstance(value, (int, float)):
            found[name] = ReachedNumber(value, replace)
            return
        if id(value) in seen or depth == 0 or isinstance(value, LEFT_ALONE):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if _is_constant(value) and num_samples not in value.shape:
                found[name] = ReachedNumber(value, value.copy_)
            return
        for inner in _entries(name, value):
            visit(inner, depth - 1)

    visit(("", function, lambda _: None), DEPTH)
    return found


def _is_constant(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and not tensor.is_complex()
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and 0 < tensor.numel() <= LARGEST_COPY
    )


def _entries(name: str, value: Any) -> Iterator[Entry]:
    """Yield what a value of the script holds."""
    if isinstance(value, partial):
        yield name, value.func, lambda _: None
    elif isinstance(value, MethodType):
        yield "self", value.__self__, lambda _: None
        yield name, value.__func__, lambda _: None
    elif isinstance(value, FunctionType):
        yield from _entries_of_function(name, value)
    elif isinstance(value, (dict, list)):
        if len(value) <= MOST_ENTRIES:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{k!r}]", v, partial(value.__setitem__, k)) for k, v in entries)
    elif hasattr(value, "__dict__") and not is_of_machinery(value):
        for key, entry in _attributes(value).items():
            yield f"{name}.{key}", entry, partial(vars(value).__setitem__, key)


def _attributes(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = vars(value)
    if not isinstance(value, nn.Module):
        return attributes
    own = {key: entry for key, entry in attributes.items() if not key.startswith("_")}
    return own | dict(value.named_buffers(recurse=False)) | dict(value.named_children())


def _entries_of_function(name: str, function: FunctionType) -> Iterator[Entry]:
    wrapped = getattr(function, "__wrapped__", None)
    if is_of_library(function.__code__):
        if wrapped is not None:  # a function of the script, with one of ours around it
            yield name, wrapped, lambda _: None
        return
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield key, cell.cell_contents, partial(setattr, cell, "cell_contents")
        except ValueError:  # not assigned yet
            continue
    table = function.__globals__
    for key in sorted(set(global_names(function.__code__))):
        if key in table:
            yield key, table[key], partial(table.__setitem__, key)
