"""Planted bugs and harmless changes: classes of loops under the decorators `planted`, `harmless`.

@planted("gradients are summed, not averaged", module="head", cause="scale")
class SumForMean(DataParallel):
    def average(self, flat: Tensor) -> Tensor:
        return self.peers.sum(flat)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from tests.mutants.loop import Loop

OF_LOSS = "the loss"
"""A module's name in place of which the loss itself is what differs first."""
OF_SAMPLES = "the samples"
"""The same where all ranks compute on the same samples."""


@dataclass(frozen=True)
class Mutant:
    """A loop that differs from a right one in one place.

    Attributes:
        name: of its class.
        loop: its class.
        change: one clause for the table.
        modules: names of modules one of which must be named first; "" is the model itself. None:
            the change is harmless.
        causes: classes of causes one of which must be named.
        links: public reports of the same kind of bug, "owner/repository#number".
    """

    name: str
    loop: type[Loop]
    change: str
    modules: tuple[str, ...] | None = None
    causes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def is_bug(self) -> bool:
        """Return True for a planted bug, False for a harmless change."""
        return self.modules is not None


_all: dict[str, Mutant] = {}


def planted(
    change: str,
    *,
    module: str | tuple[str, ...],
    cause: str | tuple[str, ...],
    links: tuple[str, ...] = (),
) -> Callable[[type[Loop]], type[Loop]]:
    """Return a decorator that lists a loop as a planted bug."""

    def listed(loop: type[Loop]) -> type[Loop]:
        modules = (module,) if isinstance(module, str) else module
        causes = (cause,) if isinstance(cause, str) else cause
        _add(Mutant(loop.__name__, loop, change, modules, causes, links))
        return loop

    return listed


def harmless(change: str) -> Callable[[type[Loop]], type[Loop]]:
    """Return a decorator that lists a loop as a harmless change."""

    def listed(loop: type[Loop]) -> type[Loop]:
        _add(Mutant(loop.__name__, loop, change))
        return loop

    return listed


def _add(mutant: Mutant) -> None:
    if mutant.name in _all:
        raise ValueError(f"two mutants are called {mutant.name}")
    _all[mutant.name] = mutant


def mutants() -> dict[str, Mutant]:
    """Return all mutants by name, in the order of the files of the catalog."""
    catalog = importlib.import_module("tests.mutants.catalog")
    for module in sorted(m.name for m in pkgutil.iter_modules(catalog.__path__)):
        importlib.import_module(f"tests.mutants.catalog.{module}")
    return dict(_all)
