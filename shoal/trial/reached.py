"""Numbers and objects that a user's function can reach: what it may read, and what it may change.

    k, meters = 0.0, {"loss": Meter()}

    def compute_loss(x, z):
        meters["loss"].update(...)              reached: meters, meters['loss'].total, k
        return real(x) - k * fake(z)

They are found in the closure of a function, in the globals that it names, in its defaults, in the
object that it is a method of, and in what these hold, a few levels deep.
"""

from __future__ import annotations

import io
import sysconfig
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from random import SystemRandom
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from shoal.comm.tensor_digest import tensor_digest
from shoal.platform.torch_private.module_state import own_buffers, own_modules, own_parameters

DEPTH = 5
LARGEST_COPY = 1 << 22
"""Numbers of the largest tensor that is copied. Larger ones are data sets and weights."""
LARGEST_TABLE = 1 << 26
"""Numbers of the largest tensor that ranks compare."""
LARGEST_WALK = 1000
"""Entries of the longest container whose entries are looked at."""
DEPTH_OF_NUMBERS, MOST_NUMBERS = 3, 64
"""The same where numbers are looked for."""
_LIBRARIES = (
    *(sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]),
    str(Path(__file__).parents[1]),
)
"""Folders whose functions keep no state of a script, Shoal's own among them."""
_OF_MACHINERY = ("torch", "shoal")
"""Packages whose objects, but for modules, tensors and generators, belong to no script."""
_LEFT_ALONE = (
    *(type, ModuleType, str, bytes, complex, type(None), SystemRandom),
    *(Optimizer, DataLoader, Dataset, torch.dtype, torch.device, io.IOBase),
)
"""Classes of objects that hold no state of a loss, or whose state others keep."""


class Place(NamedTuple):
    """Where a value stands. Of numbers, and small tensors, also what a trial asks of them.

    Attributes:
        name: as a script may write it, "balance.k".
        value: what stands there.
        write: puts another value there; None where none can be put.
        read: returns what stands there now; of variables alone.
    """

    name: str
    value: Any
    write: Callable[[Any], object] | None = None
    read: Callable[[], Any] = lambda: None

    def digest(self) -> str:
        """Return a text that is the same where the number is."""
        is_tensor = isinstance(self.value, Tensor)
        return repr(int(tensor_digest(self.value)) if is_tensor else self.value)

    @property
    def is_real(self) -> bool:
        """Return True for floats, which a slightly different value may stand for."""
        is_tensor = isinstance(self.value, Tensor)
        return self.value.is_floating_point() if is_tensor else isinstance(self.value, float)

    def change(self) -> None:
        """Put another number in its place."""
        assert self.write is not None
        self.write(self.value * 1.25 + 0.01)


def reached(
    value: Any, seen: dict[int, Any], depth: int = DEPTH, most_entries: int = LARGEST_WALK
) -> Iterator[Place]:
    """Yield a function, each object that it can reach once, and each number at every place.

    Args:
        seen: objects that are left out, by their ids; those that are yielded are added, and so
            kept alive, so that an id stays the id of one object.
        depth: levels of objects inside of one another.
        most_entries: of a container whose entries are looked at.
    """

    def visit(place: Place, depth: int) -> Iterator[Place]:
        value = place.value
        if isinstance(value, (int, float)):
            yield place
        elif depth >= 0 and id(value) not in seen and not _is_left_alone(value):
            seen[id(value)] = value
            yield place
            below = 1 if isinstance(value, nn.Module) else depth - 1
            for inner in _places_in(place.name, value, most_entries):
                yield from visit(inner, below)

    yield from visit(Place("", value), depth)


def _is_left_alone(value: Any) -> bool:
    """Return True for what holds no state of a script, as a run or a scheduler."""
    if isinstance(value, _LEFT_ALONE):
        return True
    is_of_machinery = type(value).__module__.split(".")[0] in _OF_MACHINERY
    return is_of_machinery and not isinstance(value, (Tensor, nn.Module, torch.Generator))


def _places_in(name: str, value: Any, most_entries: int) -> Iterator[Place]:
    """Yield the places of what a value of the script holds."""
    if isinstance(value, partial):
        yield from (Place(name, v) for v in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        yield from (Place("self", value.__self__), Place(name, value.__func__))
    elif isinstance(value, FunctionType):
        if not is_of_library(value.__code__):
            yield from variables_of(value)
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            yield from (Place(name, default) for default in defaults)
        elif hasattr(value, "__wrapped__"):  # of the script, with a function of ours around it
            yield Place(name, value.__wrapped__)
    elif isinstance(value, (dict, list, tuple, set, deque)):
        entries = [*(value.items() if isinstance(value, dict) else enumerate(value))]
        setter = getattr(value, "__setitem__", None)
        for key, entry in entries if len(entries) <= most_entries else ():
            yield Place(f"{name}[{key!r}]", entry, setter and partial(setter, key))
    elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
        tables: list[dict[str, Any]] = []
        if isinstance(value, nn.Module):
            tables += [own_parameters(value), own_buffers(value), own_modules(value)]
        for table in (*tables, vars(value)):
            for key, entry in [*table.items()]:
                yield Place(f"{name}.{key}", entry, partial(table.__setitem__, key))


def variables_of(function: FunctionType) -> Iterator[Place]:
    """Yield the variables around a function that it names, those that have a value now."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read, write = (partial(how, cell, "cell_contents") for how in (getattr, setattr))
        try:
            yield Place(key, cell.cell_contents, write, read)
        except ValueError:  # not assigned yet
            continue
    table = function.__globals__
    for key in sorted(set(_global_names(function.__code__))):
        if key in table:
            yield Place(key, table[key], partial(table.__setitem__, key), partial(table.get, key))


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions inside of it may look up as globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def is_of_library(code: CodeType) -> bool:
    """Return True for a function that keeps no state of a script."""
    return code.co_filename.startswith(_LIBRARIES) or "site-packages" in code.co_filename


def tensors_of(function: Any) -> list[Tensor]:
    """Return the tensors that a function of a script can reach."""
    return [place.value for place in reached(function, {}) if isinstance(place.value, Tensor)]


def reached_numbers(
    function: Any, models: Iterable[nn.Module], num_samples: int, older: Container[int] = ()
) -> dict[str, Place]:
    """Return the numbers of the script that a function can read, by their names.

    Models, tensors with a gradient, and tensors of the batch are left out. Those of the batch have
    a dimension of `num_samples`; so may a table with as many classes, which is one of `older`.

    Args: older: ids of tensors that are older than the batch. They are of it by dimension 0 alone.
    """
    seen = {id(module): module for model in models for module in model.modules()}
    found: dict[str, Place] = {}
    for place in reached(function, seen, DEPTH_OF_NUMBERS, MOST_NUMBERS):
        value = place.value
        if isinstance(value, (int, float)) and place.write is not None:
            found[place.name] = place
        elif isinstance(value, Tensor) and _is_constant(value):
            sizes = value.shape[:1] if id(value) in older else value.shape
            if num_samples not in sizes:
                is_large = value.numel() > LARGEST_COPY
                found[place.name] = place._replace(write=None if is_large else value.copy_)
    return found


def _is_constant(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and not tensor.is_complex()
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and 0 < tensor.numel() <= LARGEST_TABLE
    )
