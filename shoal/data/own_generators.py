"""Generators that a data set or a loop keeps for itself, such as `np.random.default_rng(0)`.

Every rank has a copy in the same state, so samples of different ranks would get the same numbers.
Seeding those of a data set for each sample, like the generators of the process, gives each sample
its own. Of those of a loop it is known how much they have drawn.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.seeds import preserve_rng_state, python_words, seed_all

GENERATOR_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 6
"""Objects inside of each other that are looked into: a data set, its transforms, theirs."""
_ITEMS = 64
"""Entries of a list or dict that are looked into: transforms, not samples."""


class OwnGenerators:
    """The generators of the process, and those of a data set's own code: in attributes, closures
    and module variables.

    Args: owners: the data set, and functions that work on its samples.
    """

    def __init__(self, *owners: Any) -> None:
        self._found = list(_generators_in(owners, _DEPTH, set()))

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        seed_all(seed)
        for each in self._found:
            if isinstance(each, torch.Generator):
                each.manual_seed(seed)
            elif isinstance(each, np.random.Generator):
                each.bit_generator.state = type(each.bit_generator)(seed).state
            else:
                each.seed(seed & 0xFFFFFFFF)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore their states after the block: the loop may draw from them too."""
        saved = [generator_state(each) for each in self._found]
        try:
            with preserve_rng_state():
                yield
        finally:
            for each, state in zip(self._found, saved, strict=True):
                restore_generator(each, state)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of GENERATOR_KINDS, for `restore_generator`."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    """Put a generator back to a state of `generator_state`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


class LoopGenerators:
    """NumPy's and Python's generators in the variables of a loop, as they are now.

    Args: frame: of the function, or the module, that the loop stands in; None for none.
    """

    def __init__(self, frame: FrameType | None) -> None:
        variables: dict[int, Any] = {}
        if frame is not None:
            attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
            for table in (frame.f_globals, frame.f_locals, attributes):
                variables.update((id(value), value) for value in table.values())
        self._states = [
            (value, generator_state(value))
            for value in variables.values()
            if isinstance(value, (np.random.Generator, random.Random))
            and not isinstance(value, random.SystemRandom)
        ]

    def drawn(self, words: int) -> Iterator[str]:
        """Yield the class of each that has drawn so many words, or more, since then."""
        for generator, state in self._states:
            if isinstance(generator, random.Random):
                if python_words(state, generator.getstate()) >= words:
                    yield "random.Random"
            elif _has_drawn(generator.bit_generator, state, words):
                yield "numpy.random.Generator"


def _has_drawn(bits: np.random.BitGenerator, state: Any, words: int) -> bool:
    """Return True if so many words, or more, were drawn since it had this state."""
    # As text, for some kinds have arrays in it; half a word that is left over stands beside it.
    copy, now = type(bits)(), repr(bits.state["state"])
    copy.state = state
    for _ in range(words):
        if repr(copy.state["state"]) == now:
            return False
        copy.random_raw()
    return True


def _generators_in(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield each generator once."""
    if depth < 0 or id(value) in seen or isinstance(value, (str, bytes, int, float, Tensor, type)):
        return
    seen.add(id(value))
    if isinstance(value, GENERATOR_KINDS):
        if not isinstance(value, random.SystemRandom):  # which has no state
            yield value
        return
    for item in _items_of(value):
        yield from _generators_in(item, depth - 1, seen)


def _items_of(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value[:_ITEMS]
    elif isinstance(value, Mapping):
        yield from list(value.values())[:_ITEMS] if len(value) <= _ITEMS else ()
    elif isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        yield from used.nonlocals.values()
        for item in used.globals.values():
            same_module = getattr(item, "__module__", None) == value.__module__
            if isinstance(item, GENERATOR_KINDS) or (
                isinstance(item, FunctionType) and same_module
            ):
                yield item
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif not isinstance(value, (ModuleType, np.ndarray)):
        yield from list(getattr(value, "__dict__", {}).values())
        for cls in type(value).__mro__:
            yield from (f for f in vars(cls).values() if isinstance(f, FunctionType))
