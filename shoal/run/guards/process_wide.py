"""Functions of torch that are replaced in this process while models are prepared.

A function is replaced once, however many runs there are, and put back with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from shoal.run.guards.guarded_models import GuardedModels


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


class PatchUse:
    """One run's use of a replaced function."""

    def __init__(self, patch: ProcessWidePatch, guarded: GuardedModels) -> None:
        self._patch, self._guarded = patch, guarded

    def remove(self) -> None:
        self._patch.discard(self._guarded)


def replaced_by(
    replace: Callable[[Callable[[Any], Any]], Callable[[], None]],
    make: Callable[[ProcessWidePatch, Any], Any],
) -> Callable[[ProcessWidePatch], Callable[[], None]]:
    """Return the `install` of a patch whose replacement knows the patch and the original."""
    return lambda patch: replace(lambda original: make(patch, original))
