"""All servers of a run that is replayed, in this process: nobody is talked to, and nothing happens by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.comm.compress import Compression
from shoal.errors import UsageError
from shoal.server.client import Client
from shoal.server.course import Stepped
from shoal.server.flat import Flat
from shoal.server.held import Held
from shoal.server.layout import Part
from shoal.server.recipe import Recipe
from shoal.server.said import Order


class Replayed(Client):
    """A worker's side of them: keeps what the worker pushes, and shows what it is given.

    Args:
        held: of all workers together, in the order of `parts`; the first one to come fills it.
        compression: of what is pushed.
    """

    def __init__(
        self,
        worker: int,
        parts: Sequence[Part],
        recipe: Recipe,
        flat: Flat,
        held: list[Held],
        compression: Compression | None,
    ) -> None:
        self.worker, self.parts, self.values, self.held = worker, parts, flat.values, held
        self.step, self.stop_at, self._compression = 0, 0, compression
        self._pushed: dict[int, tuple[Tensor, bytes]] = {}
        self._told: Order | None = None
        if not held:
            held += [Held(part, recipe) for part in parts]

    def take(self, part: int, values: Tensor) -> None:
        """What the servers have given to this worker."""
        self.values[part].copy_(values)

    def stepped(self) -> Stepped:
        """What was pushed and ordered in the step that has just been taken."""
        if self._told is None or len(self._pushed) < len(self.parts):
            raise UsageError("a step that is replayed has pushed nothing, or not everything")
        stepped = Stepped(self._pushed, self._told)
        self._pushed, self._told = {}, None
        return stepped

    def push(self, part: int, gradient: Tensor, present: bytes, sparse: bool = False) -> None:
        if self._compression is not None:
            gradient = self._compression.decode(gradient, self.parts[part].length, self.parts[part].dtype)
        self._pushed[part] = gradient, present

    def order(self, order: Order) -> None:
        self._told = order
        self.step += 1

    def wait(self, parts: Iterable[int]) -> None:
        """What is needed is there before a step begins."""

    def pull(self) -> None:
        for part, held in enumerate(self.held):
            self.take(part, held.values)

    def load(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        for part, state in enumerate(states):
            self.held[part].load(self.values[part], list(state), 0)

    def begin(self) -> None:
        """The values are those that were loaded."""

    def state(self, part: int) -> list[dict[str, Any]]:
        return self.held[part].state()

    def close(self, limit_s: float = 0.0) -> None:
        """There is no connection to close."""
