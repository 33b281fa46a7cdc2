"""The collectives on shared memory, as generators: each yields what must be true before it can go
on.

A generator touches nothing but the exchange and its tensors, and never waits. Whoever drives it
decides how waiting is
done: spinning, asleep, in another thread, or, in tests, in any order at all.

    yield exchange.arrived, phase        go on when all others have published this phase

Most of them are one pattern: in each phase some ranks *show* a slice of their numbers, and some
ranks *take* what was shown. The next slice is shown before this one is waited for, so that nobody
waits while there is something to copy:

          rank 0   show a0 │ show b0 │ take a0 a1 │ show c0 │ take b0 b1 │ ...
          rank 1   show a1 │ show b1 │ take a0 a1 │ show c1 │ take b0 b1 │ ...

                            shows                       takes
      all_reduce            everybody                   everybody: adds up
      reduce, gather        everybody                   the root: adds up, copies
      broadcast             the root                    everybody else
      scatter               the root, all rows          everybody: its row
      all_gather            everybody                   everybody
      reduce_scatter        everybody, all rows         everybody: its row, added up
      all_to_all            everybody, all rows         everybody: its row of each
      barrier               nothing                     nothing

Tensors are flat and contiguous here; *rows* are one flat tensor for each rank, all of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.errors import CollectiveFailed
from shoal.shm_backend.phase_board import MAX_PHASES_AHEAD, SLOT_BYTES, SLOTS, PhaseBoard, Steps
from shoal.shm_backend.reduce_kernels import reduce_into

Publish: TypeAlias = Callable[[int, int], None]
Consume: TypeAlias = Callable[[int, int], None]
ONE_PASS_BYTES = (
    1 << 19
)  # which ranks beyond the second may show; up to here a second meeting costs more than adding


def phases(
    exchange: PhaseBoard,
    count: int,
    show: Publish | None,
    take: Consume | None,
    root: int | None = None,
) -> Steps:
    """The pattern.

    Args:
        count: how many slices there are.
        show: writes slice `number` into `slot`; None where this rank has nothing to show.
        take: reads slice `number` from `slot`; None where this rank needs nothing.
        root: who must have come before anything is taken; None for all.
    """
    first = exchange.phase + 1
    for number in range(count + 1):
        if number < count:
            if show is not None:
                yield exchange.all_at_phase, first + number - MAX_PHASES_AHEAD
                show(number, (first + number) % SLOTS)
            exchange.publish()
        if number and take is not None:
            shown = first + number - 1
            if root is None:
                yield exchange.all_reached, shown
            else:
                yield exchange.has_reached, (shown, root)
            take(number - 1, shown % SLOTS)


def barrier(exchange: PhaseBoard) -> Steps:
    """Nobody leaves before everybody has come."""
    return phases(exchange, 1, None, lambda number, slot: None)


def all_reduce(exchange: PhaseBoard, tensor: Tensor, operation: str) -> Steps:
    """`tensor` becomes the reduction of all ranks' tensors, in the order of ranks."""
    if tensor.nbytes * (exchange.size - 2) > ONE_PASS_BYTES:
        return all_reduce_in_two_passes(exchange, tensor, operation)
    return all_reduce_in_one_pass(exchange, tensor, operation)


def all_reduce_in_one_pass(exchange: PhaseBoard, tensor: Tensor, operation: str) -> Steps:
    """As `phases` with a show and a take; written out, for here each microsecond of Python counts.

    Every rank adds up all of a slice. The first two ranks read their own part of it where it will
    stand."""
    slices, rank, first = in_slots(tensor), exchange.rank, exchange.phase + 1
    own: Tensor | None = None
    for number, coming in enumerate((*slices, None)):
        before, own = own, coming
        if own is not None:
            phase = first + number
            yield exchange.all_at_phase, phase - MAX_PHASES_AHEAD
            shown = exchange.peer_slots(own, phase)
            shown[rank].copy_(own)
            exchange.publish()
        if before is not None:
            yield exchange.all_reached, first + number - 1
            parts = exchange.peer_slots(before, first + number - 1)
            reduce_into(
                before,
                [before if r == rank < 2 else part for r, part in enumerate(parts)],
                operation,
            )


def reduce(exchange: PhaseBoard, tensor: Tensor, operation: str, root: int) -> Steps:
    """The root's `tensor` becomes the reduction of all, in the order of ranks."""
    slices = in_slots(tensor)

    def take(number: int, slot: int) -> None:
        out = slices[number]
        reduce_into(out, exchange.layout(out.dtype, out.numel()).whole[slot], operation)

    return phases(
        exchange, len(slices), _shows(exchange, slices), take if root == exchange.rank else None
    )


def broadcast(exchange: PhaseBoard, tensor: Tensor, root: int) -> Steps:
    """Everybody's `tensor` becomes the root's."""
    slices = in_slots(tensor)
    if root == exchange.rank:
        return phases(exchange, len(slices), _shows(exchange, slices), None)
    return phases(exchange, len(slices), None, _takes(exchange, slices, root), root)


def all_gather(
    exchange: PhaseBoard, tensor: Tensor, rows: Sequence[Tensor] | None, root: int | None = None
) -> Steps:
    """`rows` become the tensors of all ranks. Given a root, only the root has rows: a gather."""
    slices = in_slots(tensor)
    if rows is None:
        return phases(exchange, len(slices), _shows(exchange, slices), None)
    takes = [_takes(exchange, in_slots(row), rank) for rank, row in enumerate(rows)]
    rows[exchange.rank].copy_(tensor)

    def take(number: int, slot: int) -> None:
        for rank, one in enumerate(takes):
            if rank != exchange.rank:
                one(number, slot)

    return phases(exchange, len(slices), _shows(exchange, slices), take)


def scatter(
    exchange: PhaseBoard, tensor: Tensor, rows: Sequence[Tensor] | None, root: int
) -> Steps:
    """Everybody's `tensor` becomes its row of the root's rows."""
    bounds = row_bounds(tensor, exchange.size)
    if rows is not None:
        tensor.copy_(rows[exchange.rank])
        return phases(
            exchange, len(bounds), _shows_rows(exchange, rows, bounds, but=exchange.rank), None
        )

    def take(number: int, slot: int) -> None:
        begin, end = bounds[number]
        out = tensor[begin:end]
        out.copy_(
            exchange.layout(out.dtype, (end - begin) * exchange.size).rows[slot][root][
                exchange.rank
            ]
        )

    return phases(exchange, len(bounds), None, take, root)


def reduce_scatter(
    exchange: PhaseBoard, tensor: Tensor, rows: Sequence[Tensor], operation: str
) -> Steps:
    """Everybody's `tensor`, which may be its own row, becomes the reduction of its row over all
    ranks.
    """
    bounds, rank = row_bounds(tensor, exchange.size), exchange.rank
    reads_own = (
        rank < 2
    )  # the others' own row may be overwritten before its turn in the order of ranks comes

    def take(number: int, slot: int) -> None:
        begin, end = bounds[number]
        out = tensor[begin:end]
        parts = [
            shown[rank]
            for shown in exchange.layout(out.dtype, (end - begin) * exchange.size).rows[slot]
        ]
        if reads_own:
            parts[rank] = rows[rank][begin:end]
        reduce_into(out, parts, operation)

    return phases(
        exchange,
        len(bounds),
        _shows_rows(exchange, rows, bounds, but=rank if reads_own else None),
        take,
    )


def all_to_all(exchange: PhaseBoard, out_rows: Sequence[Tensor], rows: Sequence[Tensor]) -> Steps:
    """`out_rows` become everybody's row for this rank. Rows differ in length; all first show how
    long theirs are.

    Raises: CollectiveFailed: somebody sends more or less than is expected here.
    """
    lengths = torch.tensor([row.numel() for row in rows])
    table = torch.empty(exchange.size, exchange.size, dtype=torch.int64)
    yield from all_gather(exchange, lengths, table.unbind())
    for rank, (sent, out) in enumerate(
        zip(table[:, exchange.rank].tolist(), out_rows, strict=True)
    ):
        if sent != out.numel():
            raise CollectiveFailed(
                f"all_to_all: rank {exchange.names[rank]} sends {sent:,} numbers to rank "
                f"{exchange.names[exchange.rank]}, which expects {out.numel():,}. What one rank's "
                "input_split_sizes "
                "say of another, that one's output_split_sizes must say."
            )
    out_rows[exchange.rank].copy_(rows[exchange.rank])
    most = SLOT_BYTES // rows[0].element_size() // exchange.size
    slots = exchange.layout(rows[0].dtype, most * exchange.size).rows

    others = [rank for rank in range(exchange.size) if rank != exchange.rank]

    def show(number: int, slot: int) -> None:
        for rank in others:
            part = rows[rank][number * most :][:most]
            slots[slot][exchange.rank][rank][: len(part)].copy_(part)

    def take(number: int, slot: int) -> None:
        for rank in others:
            out = out_rows[rank][number * most :][:most]
            out.copy_(slots[slot][rank][exchange.rank][: len(out)])

    yield from phases(exchange, -(-int(table.max()) // most), show, take)


def all_reduce_in_two_passes(exchange: PhaseBoard, tensor: Tensor, operation: str) -> Steps:
    """Every rank adds up a piece of its own of every slice, and all read the sums.

          phase      1            2             3                         4             5
          rank 0     a0 b0 c0     next slice    A = a0 + a1 + a2  shown   slice after   read A B C, sum the next
          rank 1     a1 b1 c1                   B = b0 + b1 + b2
          rank 2     a2 b2 c2                   C = c0 + c1 + c2

    Each number is added up once on the host and not once on each rank.
    """
    slices = in_slots(tensor)
    shown: list[int] = []  # in which phase each slice was shown
    summed: list[int] = []  # and its sums
    for number in range(len(slices) + 2):
        if number < len(slices):
            yield exchange.all_at_phase, exchange.phase + 1 - MAX_PHASES_AHEAD
            own = slices[number]
            exchange.layout(own.dtype, own.numel()).whole[(exchange.phase + 1) % SLOTS][
                exchange.rank
            ].copy_(own)
            exchange.publish()
            shown.append(exchange.phase)
        if number > 1:
            yield exchange.all_reached, summed[number - 2]
            _read_sums(exchange, summed[number - 2] % SLOTS, slices[number - 2])
        if 0 < number <= len(slices):
            yield exchange.all_reached, shown[number - 1]
            yield exchange.all_at_phase, exchange.phase + 1 - MAX_PHASES_AHEAD
            _reduce_piece(exchange, shown[number - 1] % SLOTS, slices[number - 1], operation)
            exchange.publish()
            summed.append(exchange.phase)


def _reduce_piece(exchange: PhaseBoard, shown: int, own: Tensor, operation: str) -> None:
    layout, rank = exchange.layout(own.dtype, own.numel()), exchange.rank
    out = layout.pieces[(exchange.phase + 1) % SLOTS][rank][rank]
    if out.numel():
        reduce_into(out, [pieces[rank] for pieces in layout.pieces[shown]], operation)


def _read_sums(exchange: PhaseBoard, summed: int, out: Tensor) -> None:
    layout = exchange.layout(out.dtype, out.numel())
    for piece, (begin, end) in enumerate(layout.bounds):
        if end > begin:
            out[begin:end].copy_(layout.pieces[summed][piece][piece])


def in_slots(tensor: Tensor) -> tuple[Tensor, ...]:
    """Slices of a flat tensor that fit into a slot; one at least."""
    most = SLOT_BYTES // tensor.element_size()
    return (tensor,) if tensor.numel() <= most else tensor.split(most)


def row_bounds(row: Tensor, size: int) -> list[tuple[int, int]]:
    """Where to cut rows so that a slice of all of them fits into a slot; one slice at least."""
    length, most = row.numel(), SLOT_BYTES // row.element_size() // size
    return [(begin, min(begin + most, length)) for begin in range(0, max(length, 1), most)]


def _shows(exchange: PhaseBoard, slices: Sequence[Tensor]) -> Publish:
    def show(number: int, slot: int) -> None:
        own = slices[number]
        exchange.layout(own.dtype, own.numel()).whole[slot][exchange.rank].copy_(own)

    return show


def _takes(exchange: PhaseBoard, slices: Sequence[Tensor], rank: int) -> Consume:
    def take(number: int, slot: int) -> None:
        out = slices[number]
        out.copy_(exchange.layout(out.dtype, out.numel()).whole[slot][rank])

    return take


def _shows_rows(
    exchange: PhaseBoard, rows: Sequence[Tensor], bounds: Sequence[tuple[int, int]], but: int | None
) -> Publish:
    """Args: but: whose row nobody needs to see."""
    shown = [(rank, row) for rank, row in enumerate(rows) if rank != but]

    def show(number: int, slot: int) -> None:
        begin, end = bounds[number]
        places = exchange.layout(rows[0].dtype, (end - begin) * exchange.size).rows[slot][
            exchange.rank
        ]
        for rank, row in shown:
            places[rank].copy_(row[begin:end])

    return show
