"""Collectives that read each other's tensors where they lie, if they all lie in memory that all ranks can read.

    [1] tell    every rank says where its tensor is, and waits for the others. One that lies elsewhere: all copy, as in
                `collectives.py`, and everybody knows, for all have seen the same answers. Memory that is told for the
                first time is opened, and one that cannot makes all copy.
    [2] work    all_reduce          a piece of one's own summed, where it lies    then the others' pieces are copied
                reduce_scatter      the own row of all ranks, summed
                all_gather          the others' rows, copied
                broadcast           the root's numbers, copied
    [3] leave   when all have read: only then may a tensor be written again, or its memory be used for another

      all_reduce, 2 ranks        tell        sum                                 copy          leave
          rank 0's tensor       a0 b0    A=a0+a1  b0  (reads a1 of rank 1)      A B (reads B)
          rank 1's tensor       a1 b1    a1  B=b0+b1  (reads b0 of rank 0)      A B (reads A)

Where copying writes and reads slots as well, each number is read and written once. Sums are in the order of ranks,
as there, and the same to the last bit.

A rank that is stopped in [2], given up by the others, and wakes up, may have read what they have written since. They
said that they gave up before they wrote; so it asks when it has read, and takes nothing if one has.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from shoal.comm.backend import collectives
from shoal.comm.backend.exchange import Exchange, Steps
from shoal.comm.backend.reduction import reduce_into
from shoal.comm.backend.room import NEW, NOWHERE, Rooms

DIRECT_BYTES = 1 << 21  # from here on a meeting more costs less than the copies, at any number of ranks
CHUNK_BYTES = 1 << 18  # what is added up, and divided, while it is in the processor's cache

Told = Generator[tuple[Any, Any], None, list[int]]


def all_reduce(exchange: Exchange, tensor: Tensor, operation: str) -> Steps:
    """`tensor` becomes the reduction of all ranks' tensors, in the order of ranks."""
    if (rooms := exchange.rooms) is None or tensor.nbytes < DIRECT_BYTES:
        return collectives.all_reduce(exchange, tensor, operation)
    return _all_reduce(exchange, rooms, tensor, operation)


def reduce_scatter(exchange: Exchange, tensor: Tensor, rows: Sequence[Tensor], operation: str) -> Steps:
    """Everybody's `tensor`, which may be its own row, becomes the reduction of its row over all ranks."""
    if (rooms := exchange.rooms) is None or tensor.nbytes * exchange.size < DIRECT_BYTES:
        return collectives.reduce_scatter(exchange, tensor, rows, operation)
    return _reduce_scatter(exchange, rooms, tensor, rows, operation)


def all_gather(exchange: Exchange, tensor: Tensor, rows: Sequence[Tensor]) -> Steps:
    """`rows` become the tensors of all ranks."""
    if (rooms := exchange.rooms) is None or tensor.nbytes * exchange.size < DIRECT_BYTES:
        return collectives.all_gather(exchange, tensor, rows)
    return _all_gather(exchange, rooms, tensor, rows)


def broadcast(exchange: Exchange, tensor: Tensor, root: int) -> Steps:
    """Everybody's `tensor` becomes the root's."""
    if (rooms := exchange.rooms) is None or tensor.nbytes < DIRECT_BYTES:
        return collectives.broadcast(exchange, tensor, root)
    return _broadcast(exchange, rooms, tensor, root)


def _all_reduce(exchange: Exchange, rooms: Rooms, tensor: Tensor, operation: str) -> Steps:
    places = yield from _tell(exchange, rooms, rooms.own.place(tensor))  # [1]
    if NOWHERE in places:
        yield from collectives.all_reduce(exchange, tensor, operation)
        return
    numbers, bounds, rank = rooms.views(places, tensor), _bounds(tensor.numel(), exchange.size), exchange.rank
    begin, end = bounds[rank]
    _sum(tensor[begin:end], [each[begin:end] for each in numbers], rank, operation)  # [2]
    exchange.publish()
    yield exchange.arrived, exchange.phase
    for other, (begin, end) in enumerate(bounds):
        if other != rank:
            tensor[begin:end].copy_(numbers[other][begin:end])
    yield from _leave(exchange)  # [3]


def _reduce_scatter(exchange: Exchange, rooms: Rooms, tensor: Tensor, rows: Sequence[Tensor], operation: str) -> Steps:
    rank, in_place = exchange.rank, tensor.data_ptr() == rows[exchange.rank].data_ptr()
    readable = _in_a_row(rows) and (in_place or not any(_overlap(tensor, row) for row in rows))
    places = yield from _tell(exchange, rooms, _place_of_rows(rooms, rows) if readable else NOWHERE)
    if NOWHERE in places:
        yield from collectives.reduce_scatter(exchange, tensor, rows, operation)
        return
    numbers = rooms.views([place + rank * tensor.nbytes for place in places], rows[rank])
    _sum(tensor, numbers, rank if in_place else None, operation)
    yield from _leave(exchange)


def _all_gather(exchange: Exchange, rooms: Rooms, tensor: Tensor, rows: Sequence[Tensor]) -> Steps:
    rank, in_place = exchange.rank, tensor.data_ptr() == rows[exchange.rank].data_ptr()
    readable = not any(_overlap(tensor, row) for other, row in enumerate(rows) if other != rank or not in_place)
    places = yield from _tell(exchange, rooms, rooms.own.place(tensor) if readable else NOWHERE)
    if NOWHERE in places:
        yield from collectives.all_gather(exchange, tensor, rows)
        return
    for row, numbers in zip(rows, rooms.views(places, tensor), strict=True):
        if row.data_ptr() != numbers.data_ptr():
            row.copy_(numbers)
    yield from _leave(exchange)


def _broadcast(exchange: Exchange, rooms: Rooms, tensor: Tensor, root: int) -> Steps:
    place = rooms.own.place(tensor) if root == exchange.rank else NOWHERE
    place = NOWHERE if place & NEW else place  # nobody asks all ranks here whether they can open it
    exchange.publish_place(place)
    told = exchange.phase
    if root != exchange.rank:
        yield exchange.arrived_from, (told, root)
        place = exchange.places(told)[root]
    if place == NOWHERE:
        yield from collectives.broadcast(exchange, tensor, root)
        return
    if root != exchange.rank:
        tensor.copy_(rooms.view(root, place, tensor.numel(), tensor.dtype))
    yield from _leave(exchange)


def _tell(exchange: Exchange, rooms: Rooms, place: int) -> Told:
    """[1] Where each rank's tensor is; NOWHERE for one that some rank cannot open."""
    exchange.publish_place(place)
    told = exchange.phase
    yield exchange.arrived, told
    places = exchange.places(told)
    if NOWHERE in places or not any(each & NEW for each in places):
        return places
    exchange.publish_place(1 + rooms.can_open(places))
    told = exchange.phase
    yield exchange.arrived, told
    all_can = min(exchange.places(told)) == 2
    rooms.settle(place, all_can)
    return places if all_can else [NOWHERE] * exchange.size


def _leave(exchange: Exchange) -> Steps:
    """[3] Raises: PeerLost: a rank has given up, and may have written since what was read here."""
    exchange.check_nobody_gave_up()
    exchange.publish()
    yield exchange.arrived, exchange.phase


def _sum(out: Tensor, parts: Sequence[Tensor], own: int | None, operation: str) -> None:
    """`out` becomes the reduction of the parts.

    Args: own: which of them is `out` itself; None for none.
    """
    step = CHUNK_BYTES // out.element_size()
    for begin in range(0, out.numel(), step):
        chunks = [part[begin : begin + step] for part in parts]
        if own is not None and own > 1:  # it would be overwritten before its turn in the order of ranks comes
            chunks[own] = chunks[own].clone()
        reduce_into(out[begin : begin + step], chunks, operation)


def _bounds(length: int, pieces: int) -> list[tuple[int, int]]:
    """Where to cut, each piece beginning on a cache line of a tensor that does; the last ones may be empty."""
    step = -(-length // (pieces * 64)) * 64
    return [(min(step * piece, length), min(step * (piece + 1), length)) for piece in range(pieces)]


def _in_a_row(rows: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before ends."""
    begin, size_bytes = rows[0].data_ptr(), rows[0].nbytes
    return all(row.data_ptr() == begin + number * size_bytes for number, row in enumerate(rows))


def _place_of_rows(rooms: Rooms, rows: Sequence[Tensor]) -> int:
    return rooms.own.place(rows[0]) if rooms.own.place(rows[-1]) else NOWHERE


def _overlap(one: Tensor, other: Tensor) -> bool:
    begin, start = one.data_ptr(), other.data_ptr()
    return begin < start + other.nbytes and start < begin + one.nbytes
