"""The collectives on shared memory, as generators.

A generator yields the condition that must be true before it can go on. It touches nothing but the
phase board and its tensors, and it never waits. Its driver decides how to wait: spinning, asleep,
in another thread, or, in tests, in any order at all.

    yield board.all_reached, phase       go on when all other ranks have published this phase

Most collectives are one pattern, `exchange_slices`. In each phase some ranks *write* a slice of
their tensor into a slot, and some ranks *read* the slots of the others. A rank writes the next
slice before it waits for this one, so it has work while it would wait:

          rank 0   write a0 │ write b0 │ read a0 a1 │ write c0 │ read b0 b1 │ ...
          rank 1   write a1 │ write b1 │ read a0 a1 │ write c1 │ read b0 b1 │ ...

                            writes                      reads
      all_reduce            all ranks                   all ranks: reduce
      broadcast             the root                    all other ranks
      all_gather            all ranks                   all ranks
      reduce_scatter        all ranks, all rows         all ranks: reduce their row
      barrier               nothing                     nothing

Tensors are flat and contiguous here. *Rows* are one flat tensor for each rank, all of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.shm_backend.phase_board import MAX_PHASES_AHEAD, SLOT_BYTES, SLOTS, PhaseBoard, Steps

# Called with the index of a slice and the slot to write into, or to read from.
WriteSlice: TypeAlias = Callable[[int, int], None]
ReadSlice: TypeAlias = Callable[[int, int], None]


def exchange_slices(
    board: PhaseBoard,
    count: int,
    write: WriteSlice | None,
    read: ReadSlice | None,
    root: int | None = None,
) -> Steps:
    """Write and read `count` slices, as in the drawing above.

    All ranks compare their calls in the first phase, also those that read nothing: a rank with
    another root would go on with other values than its peers.

    Args:
        write: writes a slice into a slot; None if this rank has nothing to write.
        read: reads a slice from a slot; None if this rank needs nothing.
        root: the rank that must have published before a later read; None for all ranks.
    """
    if board.size == 1:
        return
    first = board.phase + 1
    for index in range(count + 1):
        if index < count:
            if write is not None:
                # The slot is free when all ranks have read its previous values.
                yield board.all_at_phase, first + index - MAX_PHASES_AHEAD
                write(index, (first + index) % SLOTS)
            board.publish()
        written = first + index - 1
        if index == 1 or (index and read is not None and root is None):
            yield board.all_reached, written
        elif index and read is not None:
            yield board.has_reached, (written, root)
        if index and read is not None:
            read(index - 1, written % SLOTS)


def barrier(board: PhaseBoard) -> Steps:
    """Wait until all ranks have called this function."""
    return exchange_slices(board, 1, None, lambda index, slot: None)


def all_reduce(board: PhaseBoard, tensor: Tensor, operation: str) -> Steps:
    """Reduce `tensor` over all ranks in the order of ranks, in place.

    Ranks 0 and 1 read their own values from `tensor` itself and not from their slot: their values
    are the first two terms, so they are read before the result overwrites them.
    """
    slices = slot_slices(tensor)

    def read(index: int, slot: int) -> None:
        out = slices[index]
        terms = board.slots(out.dtype, out.numel())[slot]
        if board.rank < 2:
            terms = [out if rank == board.rank else term for rank, term in enumerate(terms)]
        reduce_into(out, terms, operation)

    return exchange_slices(board, len(slices), _slice_writer(board, slices), read)


def broadcast(board: PhaseBoard, tensor: Tensor, root: int) -> Steps:
    """Copy the root's `tensor` into the `tensor` of all other ranks."""
    slices = slot_slices(tensor)
    if root == board.rank:
        return exchange_slices(board, len(slices), _slice_writer(board, slices), None)
    return exchange_slices(board, len(slices), None, _slice_reader(board, slices, root), root)


def all_gather(board: PhaseBoard, tensor: Tensor, rows: Sequence[Tensor]) -> Steps:
    """Copy the tensors of all ranks into `rows`."""
    slices = slot_slices(tensor)
    readers = [_slice_reader(board, slot_slices(row), rank) for rank, row in enumerate(rows)]
    rows[board.rank].copy_(tensor)

    def read(index: int, slot: int) -> None:
        for rank, read_row in enumerate(readers):
            if rank != board.rank:
                read_row(index, slot)

    return exchange_slices(board, len(slices), _slice_writer(board, slices), read)


def reduce_scatter(
    board: PhaseBoard, tensor: Tensor, rows: Sequence[Tensor], operation: str
) -> Steps:
    """Reduce row r of all ranks into the `tensor` of rank r.

    `tensor` may be this rank's row itself.
    """
    rank, size, length = board.rank, board.size, tensor.numel()
    if size == 1:
        tensor.copy_(rows[0])
    max_length = SLOT_BYTES // tensor.element_size() // size  # slices of all rows fit into a slot
    begins = range(0, max(length, 1), max_length)
    bounds = [(begin, min(begin + max_length, length)) for begin in begins]
    # Ranks 0 and 1 read their values from their row and not from their slot. On later ranks the
    # result could overwrite the row before the turn of its values in the order of ranks.
    reads_local_row = rank < 2
    written_rows = [(r, row) for r, row in enumerate(rows) if r != rank or not reads_local_row]

    def write(index: int, slot: int) -> None:
        begin, end = bounds[index]
        slots = board.slots(tensor.dtype, (end - begin) * size)
        outs = slots[slot][rank].view(size, end - begin)
        for r, row in written_rows:
            outs[r].copy_(_part(row, begin, end))

    def read(index: int, slot: int) -> None:
        begin, end = bounds[index]
        out = _part(tensor, begin, end)
        slots = board.slots(out.dtype, (end - begin) * size)
        terms = [written.view(size, end - begin)[rank] for written in slots[slot]]
        if reads_local_row:
            terms[rank] = _part(rows[rank], begin, end)
        reduce_into(out, terms, operation)

    return exchange_slices(board, len(bounds), write, read)


def slot_slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a flat tensor into slices that fit into a slot; at least one slice."""
    max_length = SLOT_BYTES // tensor.element_size()
    return (tensor,) if tensor.numel() <= max_length else tensor.split(max_length)


def _part(row: Tensor, begin: int, end: int) -> Tensor:
    """Return `row[begin:end]`; the row itself, in a tenth of the time, if that is all of it."""
    return row if end - begin == row.numel() else row[begin:end]


def _slice_writer(board: PhaseBoard, slices: Sequence[Tensor]) -> WriteSlice:
    def write(index: int, slot: int) -> None:
        values = slices[index]
        board.slots(values.dtype, values.numel())[slot][board.rank].copy_(values)

    return write


def _slice_reader(board: PhaseBoard, slices: Sequence[Tensor], rank: int) -> ReadSlice:
    def read(index: int, slot: int) -> None:
        out = slices[index]
        out.copy_(board.slots(out.dtype, out.numel())[slot][rank])

    return read


Combine = Callable[..., Any]

# "avg" is a sum that is divided at the end.
COMBINE: Mapping[str, Combine] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
# The dtypes that torch adds.
REDUCIBLE = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


def reduce_into(out: Tensor, terms: Sequence[Tensor], operation: str) -> None:
    """Reduce `terms` into `out` in their order; "avg" divides the sum by their number.

    Args:
        out: as long as each term. It may be one of the first two terms, but no later one: the first
            addition overwrites it.
        terms: two or more.
    """
    combine = COMBINE[operation]
    combine(terms[0], terms[1], out=out)
    for term in terms[2:]:
        combine(out, term, out=out)
    if operation == "avg":
        out.div_(len(terms))


@cache
def can_reduce(dtype: torch.dtype, operation: str) -> bool:
    """Return True if `reduce_into` supports this dtype and operation.

    Gloo gets the other calls. It supports some of them and raises an error for the rest.
    """
    if operation not in COMBINE or dtype not in REDUCIBLE:
        return False
    if operation == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return operation in ("sum", "product") or not dtype.is_complex
