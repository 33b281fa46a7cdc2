"""Functions of torch that are replaced in this process while models are prepared.

A function is replaced once, however many runs there are, and put back with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from shoal.platform.torch_private.replaced_functions import replace_function
from shoal.run.guards.guarded_models import GuardedModels

Places = tuple[tuple[Any, str], ...]
"""Owners of a function, and its name there: such as TOTAL_NORM of `replaced_functions`."""


class ProcessWidePatch:
    """A replaced function, and the prepared models that it looks at.

    Args: install: replaces the function, and returns a function that puts it back.

    Attributes: refs: weak references to the prepared models of all runs. Some may be gone.
    """

    def __init__(self, install: Callable[[ProcessWidePatch], Callable[[], None]]) -> None:
        # A list: each backward pass goes through it, and through a WeakSet it takes longer.
        self.refs: list[ref[GuardedModels]] = []
        self._install = install
        self._put_back: Callable[[], None] | None = None
        self._pauses = 0

    @property
    def active(self) -> list[GuardedModels]:
        """Prepared models of all runs that are still alive."""
        return [guarded for known in self.refs if (guarded := known()) is not None]

    def add(self, guarded: GuardedModels) -> PatchUse:
        """Look at `guarded`, too, until the returned object is removed."""
        if self._put_back is None:
            self._put_back = self._install(self)
        self.refs = [ref(other) for other in {*self.active, guarded}]
        return PatchUse(self, guarded)

    def discard(self, guarded: GuardedModels) -> None:
        """Forget `guarded`; put the function back if no other is left."""
        self.refs = [ref(other) for other in self.active if other is not guarded]
        if not self.refs and self._put_back is not None:
            self._put_back()
            self._put_back = None

    def pause(self, *_: Any) -> None:
        """Put the function back until `go_on` is called as often."""
        self._pauses += 1
        if self._pauses == 1 and self._put_back is not None:
            self._put_back()

    def go_on(self, *_: Any) -> None:
        """Replace the function again."""
        self._pauses -= 1
        if self._pauses == 0 and self._put_back is not None:
            self._put_back = self._install(self)


class PatchUse:
    """One run's use of a replaced function."""

    def __init__(self, patch: ProcessWidePatch, guarded: GuardedModels) -> None:
        self._patch, self._guarded = patch, guarded

    def remove(self) -> None:
        self._patch.discard(self._guarded)


def replaced(places: Places, make: Callable[[ProcessWidePatch, Any], Any]) -> ProcessWidePatch:
    """Return the patch of a function by what `make` returns for the patch and the original."""
    return ProcessWidePatch(
        lambda patch: replace_function(places, lambda original: make(patch, original))
    )
