"""All-reduces of float32 and float64, and broadcasts, with compiled steps (native.c), if a compiler
was found.

      rank 0   advance ──> write a0 │ read a0 a1 ──> done
      rank 1   advance ──> write a1 │ rank 0 is late ──> wait in Python ──> advance ──> read a0 a1

Compiled steps cut tensors into smaller slices than collectives.py does, so a call uses them only if
all ranks of the host have them. Sums are the same to the last bit."""

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
    except ImportError:  # there was no compiler when Shoal was installed
        compiled = None

# The version of what ranks write into their memory, and of the compiled module's arguments. Raise
# it here and in native.c with every change of either.
VERSION = 4
SLICE_BYTES = 1 << 15  # slices of all ranks stay in the processor's caches together
# Tensors from LARGE_BYTES on have slices as large as a slot: ranks that lose their cores to other
# processes now and then wait for each other less often.
LARGE_BYTES = 1 << 21
LARGE_SLICE_BYTES = SLOT_BYTES
# The bytes of other ranks that a rank reads to reduce a slice alone. Above it, each rank reduces
# one piece of the slice.
ONE_PASS_BYTES = 1 << 17
SPIN_S = 50e-6
MAX_RANKS = 64  # the same limit as in native.c
# The codes of native.c for a dtype and an operation.
CODES: Mapping[tuple[torch.dtype, str], int] = {
    (torch.float32, "sum"): 0,
    (torch.float32, "avg"): 1,
    (torch.float64, "sum"): 2,
    (torch.float64, "avg"): 3,
}
BROADCAST = 4  # the code of a broadcast is this number + its root
ROOT_IN_SAME_CALL = 2  # a value of NativeAllReduce.same_call


def version() -> int:
    """Return VERSION if there are compiled steps of this version, else 0.

    SHOAL_COMPILED=0 in the environment disables them.
    """
    is_usable = (
        compiled is not None
        and compiled.VERSION == VERSION
        and os.environ.get("SHOAL_COMPILED") != "0"
    )
    return VERSION if is_usable else 0


class NativeCalls:
    """The compiled steps of one rank in one group of at most MAX_RANKS ranks.

    Args:
        board: the phase board of the group.
        yields: give the processor to other processes while this rank waits, because there are more
            ranks than processors.
    """

    def __init__(self, board: PhaseBoard, yields: bool = True) -> None:
        self._board = board  # keeps the memory alive, of which C has only the addresses
        self.small = _native_all_reduce(board, SLICE_BYTES, yields)
        self.large = _native_all_reduce(board, LARGE_SLICE_BYTES, yields)

    def all_reduce(self, tensor: Tensor, code: int) -> Steps:
        """Reduce `tensor` over all ranks in the order of ranks, in place.

        All steps that need no wait are taken before this method returns.

        Args: code: one of CODES.
        """
        native = self.small if tensor.nbytes < LARGE_BYTES else self.large
        return self._steps(native, tensor, code)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Copy the root's `tensor`, flat and below LARGE_BYTES, to all other ranks."""
        return self._steps(self.small, tensor, BROADCAST + root)

    def _steps(self, native: compiled.NativeAllReduce, tensor: Tensor, code: int) -> Steps:
        board = self._board
        call = tensor.data_ptr(), tensor.nbytes, code, board.word, board.phase + 1
        step = native.advance(*call, 0)
        board.resync_phase()
        return () if step < 0 else self._remaining_steps(native, call, step)

    def _remaining_steps(
        self, native: compiled.NativeAllReduce, call: tuple[int, int, int, int, int], step: int
    ) -> Steps:
        """Yield the condition of each step that had to wait, then go on in C.

        Args: call: address, bytes, code, word and first phase.
        """
        board = self._board
        while step >= 0:
            if native.same_call == ROOT_IN_SAME_CALL:
                yield board.has_reached, (native.awaited_phase, call[2] - BROADCAST)
            else:
                condition = board.all_reached if native.same_call else board.all_at_phase
                yield condition, native.awaited_phase
            step = native.advance(*call, step)
            board.resync_phase()


def _native_all_reduce(
    board: PhaseBoard, slice_bytes: int, yields: bool
) -> compiled.NativeAllReduce:
    return compiled.NativeAllReduce(
        rank=board.rank,
        words=[memory.head_address(0) for memory in board.memories],
        slots=[memory.tensor(SLOTS_AT, 1, torch.uint8).data_ptr() for memory in board.memories],
        layout=(PHASE, SLEEPS, RING_AT, RING, SLOTS, SLOT_BYTES, MAX_PHASES_AHEAD),
        slicing=(slice_bytes, ONE_PASS_BYTES // (board.size - 1)),
        spin_ns=int(SPIN_S * 1e9),
        yields=yields,
    )
