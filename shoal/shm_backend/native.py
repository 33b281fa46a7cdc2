"""All-reduces of float32 and float64 whose steps are compiled (native.c), where there was a
compiler.

      rank 0   advance ──> show a0 │ take a0 a1 ──> done
      rank 1   advance ──> show a1 │ rank 0 is late ──> Python waits for it ──> advance ──> take a0 a1 ──> done

Only calls whose steps all ranks of a host have compiled go this way, for they cut tensors into
smaller slices than collectives.py does. Sums are the same to the last bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.shm_backend.phase_board import (
    MAX_PHASES_AHEAD,
    PHASE,
    RING,
    RING_AT,
    SLEEPS,
    SLOT_BYTES,
    SLOTS,
    SLOTS_AT,
    PhaseBoard,
    Steps,
)

if TYPE_CHECKING:
    from shoal.shm_backend import _native as compiled
else:
    try:
        from shoal.shm_backend import _native as compiled
    except ImportError:  # no compiler when Shoal was installed
        compiled = None

# of what ranks do with each other's memory: raised here and in native.c by whoever changes it
VERSION = 1
SLICE_BYTES = 1 << 15  # a few of every rank's stay in the caches
# From here on slices are as large as a slot: ranks that lose their cores to other processes now and
# then wait for each other less often.
LARGE_BYTES, LARGE_SLICE_BYTES = 1 << 21, SLOT_BYTES
ONE_PASS_BYTES = (
    1 << 17
)  # what a rank reads of others to add up all by itself; beyond it, sums are shared
SPIN_S = 50e-6
MAX_RANKS = 64  # as in native.c, and so are these numbers
CODES: Mapping[tuple[torch.dtype, str], int] = {
    (torch.float32, "sum"): 0,
    (torch.float32, "avg"): 1,
    (torch.float64, "sum"): 2,
    (torch.float64, "avg"): 3,
}


def version() -> int:
    """Which steps there are; 0 without any, where they are of another version, and with
    SHOAL_COMPILED=0.
    """
    there = (
        compiled is not None
        and compiled.VERSION == VERSION
        and os.environ.get("SHOAL_COMPILED") != "0"
    )
    return VERSION if there else 0


class NativeCalls:
    """The compiled steps of one rank in one group of at most MAX_RANKS.

    Args: yields: the processor is given to others while a rank waits, for there are more ranks than
    processors."""

    def __init__(self, board: PhaseBoard, yields: bool = True) -> None:
        self._board = (
            exchange  # and with it the memory, of which the compiled steps have but the addresses
        )
        self._compiled = _compiled_steps(board, SLICE_BYTES, yields)
        self._compiled_large = _compiled_steps(board, LARGE_SLICE_BYTES, yields)

    def all_reduce(self, tensor: Tensor, code: int) -> Steps:
        """`tensor` becomes the reduction of all ranks' tensors, in the order of ranks. What can be
        is done at once.

        Args: code: one of CODES.
        """
        board, address, size_bytes = self._board, tensor.data_ptr(), tensor.nbytes
        first = board.phase + 1
        steps = self._compiled if size_bytes < LARGE_BYTES else self._compiled_large
        step = steps.advance(address, size_bytes, code, board.word, first, 0)
        board.resync_phase()
        return (
            self._timeout_error(steps, address, size_bytes, code, first, step) if step >= 0 else ()
        )

    def _timeout_error(
        self,
        steps: compiled.NativeAllReduce,
        address: int,
        size_bytes: int,
        code: int,
        first: int,
        step: int,
    ) -> Steps:
        board = self._exchange
        while step >= 0:
            yield (
                board.all_reached if steps.of_this_call else board.all_at_phase,
                steps.wanted,
            )
            step = steps.advance(address, size_bytes, code, board.word, first, step)
            board.resync_phase()


def _compiled_steps(board: PhaseBoard, slice_bytes: int, yields: bool) -> compiled.NativeAllReduce:
    words = [memory.head_address(0) for memory in board.memories]
    numbers = [memory.tensor(SLOTS_AT, 1, torch.uint8).data_ptr() for memory in board.memories]
    offsets = PHASE, SLEEPS, RING_AT, RING, SLOTS, SLOT_BYTES, MAX_PHASES_AHEAD
    sizes = slice_bytes, ONE_PASS_BYTES // (board.size - 1)
    spin_ns = int(SPIN_S * 1e9)
    return compiled.NativeAllReduce(board.rank, words, numbers, *offsets, *sizes, spin_ns, yields)
