"""The mean over Gloo in the order of ranks, in the time of a ring.

A ring begins each chunk on another rank, so its sums have another order in each chunk. Here every
rank reduces one chunk of a slice from rank 0 upwards, and so it needs the terms of all ranks. In
step k a rank sends to the k-th rank after it and receives from the k-th rank before it:

      three ranks      step 1                 step 2
      rank 0           b0 to 1, a2 from 2     c0 to 2, a1 from 1      A = a0 + a1 + a2
      rank 1           c1 to 2, b0 from 0     a1 to 0, b2 from 2      B = b0 + b1 + b2
      rank 2           a2 to 0, c1 from 1     b2 to 1, c0 from 0      C = c0 + c1 + c2

The same steps carry A, B and C to all ranks. Slices overlap, so that a link is never idle while a
rank waits for its last term and adds:

      link     scatter 0 │ scatter 1 │ gather 0 │ scatter 2 │ gather 1 │ gather 2
      rank                           reduce 0              reduce 1   reduce 2

A rank sends 2 (n - 1)/n of the tensor in all, as in a ring, and to one rank at a time: where all
ranks send to one, its link overflows and TCP has to slow down. A chain from rank 0 to rank n - 1
and back adds in this order too, but the ranks inside it send the tensor twice, 2 (n - 1)/n < 2.

Receives start AHEAD steps before their turn. Gloo sends only after the receiver's note, and without
this the note would wait behind data on the same connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm.equal_chunks import receive, send
from shoal.shm_backend.collectives import reduce_into

# Smaller messages cost more time of the processor, larger ones leave a link idle at both ends.
CHUNK_BYTES = 1 << 17
AHEAD = 3
# A slice's terms are overwritten BUFFERS slices later. In that time a rank must have reduced it,
# although receives start AHEAD steps early: (2 BUFFERS - 3) (ranks - 1) > AHEAD.
BUFFERS = 4


class ExchangeStep(NamedTuple):
    """One message out and one in.

    Args:
        part: index of the slice.
        gathers: True for a reduced chunk, False for terms.
        distance: from this rank to the receiver, and from the sender to this rank.
    """

    part: int
    gathers: bool
    distance: int


def average(gloo: Any, tensor: Tensor) -> None:
    """Average `tensor` over all ranks in the order of ranks, in place, with the same bits on each.
    Collective.

    Args:
        gloo: a process group whose messages go through Gloo, or its Gloo backend.
        tensor: flat and contiguous.
    """
    if gloo.size() > 1 and tensor.numel():
        _PairwiseExchange(gloo, tensor).run()


class _PairwiseExchange:
    def __init__(self, gloo: Any, tensor: Tensor) -> None:
        self.gloo = gloo
        self.rank, self.size = gloo.rank(), gloo.size()
        share = -(-tensor.numel() // self.size)
        length = min(share, max(1, CHUNK_BYTES // tensor.element_size()))
        slices = tensor.split(length * self.size)
        # Equal chunks; the last ones of the last slice may be shorter or empty.
        self.chunks = [_chunks(part, self.size) for part in slices]
        self.terms = tensor.new_empty(min(BUFFERS, len(slices)), self.size, length)
        self.steps = list(schedule(len(slices), self.size))
        self.receives: dict[int, Any] = {}
        self.posted = 0

    def run(self) -> None:
        for number, step in enumerate(self.steps):
            self._post_receives(number + AHEAD)
            if step.gathers and step.distance == 1:
                self._reduce(step.part)
            chunks = self.chunks[step.part]
            to = (self.rank + step.distance) % self.size
            sent = send(self.gloo, chunks[self.rank if step.gathers else to], to)
            if sent is not None:
                sent.wait()
            # A rank is at most AHEAD steps before its neighbours: messages queue up otherwise.
            self._await_receive(number - AHEAD)
        for number in list(self.receives):
            self._await_receive(number)

    def _post_receives(self, last: int) -> None:
        """Start the receives of all steps up to `last`."""
        while self.posted <= min(last, len(self.steps) - 1):
            step = self.steps[self.posted]
            source = (self.rank - step.distance) % self.size
            # A rank sends a reduced chunk after all terms of it have arrived there, so nothing
            # reads this rank's terms any more.
            into = self.chunks[step.part][source] if step.gathers else self._term(step.part, source)
            work = receive(self.gloo, into, source)
            if work is not None:
                self.receives[self.posted] = work
            self.posted += 1

    def _await_receive(self, number: int) -> None:
        # Gloo's handles can be waited for once.
        if (work := self.receives.pop(number, None)) is not None:
            work.wait()

    def _reduce(self, index: int) -> None:
        """Wait for all terms of this rank's chunk of a slice, and reduce it."""
        for number in list(self.receives):
            if self.steps[number].part == index and not self.steps[number].gathers:
                self._await_receive(number)
        out = self.chunks[index][self.rank]
        if out.numel():
            terms = [
                out if rank == self.rank else self._term(index, rank) for rank in range(self.size)
            ]
            # The first addition overwrites its result, which must not be a later term.
            result = out if self.rank < 2 else terms[0]
            reduce_into(result, terms, "avg")
            if result is not out:
                out.copy_(result)

    def _term(self, index: int, rank: int) -> Tensor:
        """Return the memory for another rank's values of this rank's chunk."""
        length = self.chunks[index][self.rank].numel()
        return self.terms[index % BUFFERS, rank, :length]


def schedule(slices: int, size: int) -> Iterator[ExchangeStep]:
    """Yield the steps of all ranks: the terms of the next slice before the sums of this one."""
    for index in range(-1, slices):
        for each, gathers in ((index + 1, False), (index, True)):
            if 0 <= each < slices:
                yield from (ExchangeStep(each, gathers, distance) for distance in range(1, size))


def _chunks(part: Tensor, size: int) -> list[Tensor]:
    """Split a slice into a chunk for each rank; the last ones may be shorter or empty."""
    chunks = list(part.split(-(-part.numel() // size)))
    return chunks + [part[:0]] * (size - len(chunks))
