"""Where a worker says what it has to say: a link to every shard, and who answers for which part.

Who does, the placement says. While a part moves, what is to be said of it waits for its new owner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from shoal.errors import ServerLost
from shoal.server.arbiter import Address, View
from shoal.server.link import RECOVER_S, Link, Push, Question
from shoal.server.messages import Op
from shoal.server.peer import Payload
from shoal.server.placement import Placement
from shoal.server.transport_settings import Transport
from shoal.server.views import AGAIN_S, Views

Moved = Callable[[int, Op], None]
Ordered = tuple[int, bytes]


class Routes:
    """One worker's.

    Args:
        parts: how many there are.
        make: a link to a shard; it is given the views, what to tell of parts that are elsewhere, and the last order.
    """

    def __init__(self, parts: int, make: Callable[[int, Views, Moved, Ordered | None], Link]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._placement = Placement(0, (0,) * parts)
        self._order: Ordered | None = None
        self._recording = False
        self._gone = threading.Event()
        self._found = threading.Event()  # is set when there is a link to every shard

    def begin(self, worker: int, arbiter: Address, transport: Transport) -> None:
        """Have links to all shards. Raises ServerLost: the arbiter says nothing."""
        self.views = Views(
            worker,
            arbiter,
            transport,
            changed=self._viewed,
            placed=self._placed,
            answered=lambda _: self._gone.set(),
        )
        self.views.begin()
        if not self._found.wait(RECOVER_S):
            raise ServerLost(f"the arbiter at {arbiter[0]}:{arbiter[1]} has said nothing for {RECOVER_S:g} s.")

    def owner(self, part: int) -> int:
        """The shard that answers for a part, or has until its move began."""
        return self._placement.owners[part]

    def shards(self) -> list[int]:
        """Those that have parts."""
        return sorted(set(self._placement.owners))

    def push(self, part: int, push: Push) -> None:
        """Send a gradient; it must not change before the values of the next step have come."""
        with self._lock:
            link, now = self._route(part)
            link.push(part, push, now)

    def order(self, step: int, payload: bytes) -> None:
        """Send all shards a step's order, later ones too."""
        with self._lock:
            self._order = step, payload
            for link in self._links.values():
                link.order(step, payload)

    def ask(self, op: Op, payloads: Mapping[int, Payload], step: int) -> None:
        """Ask about several parts."""
        with self._lock:
            for part, payload in payloads.items():
                question: Question = (op, payload, {"part": part, "step": step})
                link, now = self._route(part)
                link.ask(part, question, now)

    def ask_shard(self, shard: int, op: Op, payload: bytes = b"") -> None:
        """Ask a shard about itself."""
        with self._lock:
            self._links[shard].ask_shard((op, payload, {"part": shard}))

    def record(self) -> None:
        """Have all shards, later ones too, note what they do."""
        with self._lock:
            self._recording = True
            for link in self._links.values():
                link.record()

    def post(self, op: Op) -> None:
        """Tell shard 0 what has no answer."""
        self._links[0].post(op)

    def close(self, limit_s: float) -> None:
        """Hang up, for good: the arbiter is told."""
        self.views.post(Op.BYE)
        self._gone.wait(limit_s)
        self.views.close()
        for link in self._links.values():
            link.close()

    def _route(self, part: int) -> tuple[Link, bool]:
        """The link that has to say what is said of a part, and whether it may say so now. Holds the lock."""
        return self._links[self.owner(part)], part not in self._placement.moving

    def _viewed(self, view: View) -> None:
        link = self._links.get(view.shard)
        if link is not None:
            link.follow(view)

    def _placed(self, placement: Placement) -> None:
        """Have links for all shards, and what was said of a part where it is now."""
        with self._lock:
            before, self._placement = self._placement, placement
            for shard in {0, *placement.owners, *(move.target for move in placement.moving.values())}:
                if shard not in self._links:
                    self._links[shard] = self._make(shard, self.views, self._moved, self._order)
                    if self._recording:
                        self._links[shard].record()
            for part, owner in enumerate(before.owners):
                now, then = placement.route(part), before.route(part)
                if before.version and now != then:
                    said = self._links[owner].hand_over(part)
                    self._links[placement.owners[part]].take_over(part, said, now is not None)
        self._found.set()

    def _moved(self, part: int, op: Op) -> None:
        """A shard does not answer for this part, or does not know yet that it is to."""
        again = threading.Timer(AGAIN_S, self._say_once_more, (part, op))
        again.daemon = True
        again.start()

    def _say_once_more(self, part: int, op: Op) -> None:
        with self._lock:
            link, now = self._route(part)
            if now:
                link.say_once_more(part, op)
