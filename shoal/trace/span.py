"""A stretch of time on one rank."""

from __future__ import annotations

from typing import NamedTuple

STEP, DATA, FORWARD, BACKWARD, OPTIMIZER, ASIDE = (
    "step",
    "data",
    "forward",
    "backward",
    "optimizer",
    "aside",
)
BLOCKED, EXCHANGE = "blocked", "exchange"
KINDS = (STEP, DATA, FORWARD, BACKWARD, OPTIMIZER, ASIDE, BLOCKED, EXCHANGE)


class Span(NamedTuple):
    """Something that took time.

    Args: kind: one of KINDS. STEP: from the end of one optimizer step to the end of the next.
        ASIDE: an evaluation or a
            save in between. BLOCKED: the thread that takes the steps waits for an exchange and
            computes nothing.
            EXCHANGE: a collective or a message on its way, from when this rank has come to it.
        start_ns, end_ns: on the clock of its rank until spans of several ranks are put together,
        then on rank 0's.
        size_bytes: of an exchange: the numbers that this rank gives or gets.
        meeting: of an exchange, and of a BLOCKED that knows what it waits for: which group, or
            which sender and receiver in it. "" for a BLOCKED that waits for whatever is under way.
        number: which exchange of this meeting, in the order in which all its ranks come to them.
        ranks: of an exchange: those of the world whom this rank has to wait for. Of a broadcast it
            is the root alone, of a message its sender.
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
        return self.start_ns, self.end_ns

    def moved(self, by_ns: int) -> Span:
        """The same on a clock that is `by_ns` ahead."""
        return self._replace(start_ns=self.start_ns + by_ns, end_ns=self.end_ns + by_ns)
