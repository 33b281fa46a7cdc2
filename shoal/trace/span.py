"""Spans: pieces of time with a kind and a name, on one rank."""

from __future__ import annotations

from typing import NamedTuple

STEP = "step"
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
ASIDE = "aside"
BLOCKED = "blocked"
EXCHANGE = "exchange"
KINDS = (STEP, DATA, FORWARD, BACKWARD, OPTIMIZER, ASIDE, BLOCKED, EXCHANGE)
"""The kinds of spans:

- STEP: from the end of one optimizer step to the end of the next.
- DATA, FORWARD, BACKWARD, OPTIMIZER: phases of a step.
- ASIDE: an evaluation or a save between two steps.
- BLOCKED: the training thread waits for an exchange and computes nothing.
- EXCHANGE: a collective or a message, from the moment when this rank enters it.
"""


class Span(NamedTuple):
    """A piece of time.

    Attributes:
        kind: one of KINDS.
        start_ns, end_ns: on the clock of its rank; on rank 0's clock in a trace of several ranks.
        size_bytes: of an exchange: the size of the tensors that this rank sends or receives.
        collective_id: of an exchange: its group, or its sender and receiver in the group. Of a
            BLOCKED: that of the exchange it waits for; "" if it waits for any that is in flight.
        number: index of the exchange among those of one collective_id. All ranks enter them in the
            same order, so the number is the same on all ranks.
        ranks: of an exchange: ranks of the world for which this rank has to wait. For a broadcast
            that is the root, for a message its sender.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int
    size_bytes: int = 0
    collective_id: str = ""
    number: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def interval(self) -> tuple[int, int]:
        """Return start and end, in nanoseconds."""
        return self.start_ns, self.end_ns

    def moved(self, by_ns: int) -> Span:
        """Return the span on a clock that is `by_ns` ahead."""
        return self._replace(start_ns=self.start_ns + by_ns, end_ns=self.end_ns + by_ns)
