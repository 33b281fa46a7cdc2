"""Plain all-reduces and broadcasts as one C call each (compiled_calls.c), for the usual case.

group.allreduce([tensor], opts)
  │
  ├── compiled: check, take the turn, all steps ──> a complete handle
  │                     └── a rank is late ───────> `_go_on`, in call_queue.py
  └── not plain: None ────────────────────────────> dispatch.py
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Work

from shoal.platform.tensors import DTYPE_NUMBERS
from shoal.platform.torch_private.c10d import Options
from shoal.platform.torch_private.dispatch_state import is_profiling, number_of_modes
from shoal.shm_backend.call import CallSignature, decode
from shoal.shm_backend.call_handles import CompletedWork
from shoal.shm_backend.call_queue import CallQueue
from shoal.shm_backend.native import CODES, LARGE_BYTES, NativeCalls
from shoal.shm_backend.phase_board import CALLS, PhaseBoard
from shoal.watchdog.progress_writer import own_progress

if TYPE_CHECKING:
    from shoal.shm_backend import _native


def plain_calls(
    queue: CallQueue, native: NativeCalls, board: PhaseBoard
) -> _native.CompiledCalls | None:
    """Return the plain calls of a group; None if this torch shows operations in another way."""
    if board.progress is None or not _operations_are_readable():
        return None
    from shoal.shm_backend import _native

    return _native.CompiledCalls(
        LARGE_BYTES,
        CALLS,
        CallSignature("all_reduce", torch.uint8, 0, "sum").encoded - _dtype_bits(torch.uint8),
        CallSignature("broadcast").encoded - _dtype_bits(torch.uint8),
        small=native.small,
        large=native.large,
        tensor=Tensor,
        strided=torch.strided,
        allreduce_options=Options.AllreduceOptions,
        broadcast_options=Options.BroadcastOptions,
        dtypes=_dtypes(),
        number_of_modes=number_of_modes,
        is_profiling=is_profiling,
        queue=queue,
        jobs=queue.jobs,
        acquire=queue.turn.acquire,
        release=queue.turn.release,
        give_up=queue.give_up,
        completed=queue.completed,
        completed_work=CompletedWork,
        writer=own_progress(),
        begin_progress=board.progress.begin,
        go_on=partial(_go_on, queue, native),
    )


def _go_on(
    queue: CallQueue,
    native: NativeCalls,
    plain: _native.CompiledCalls,
    steps: _native.NativeAllReduce,
    tensors: list[Tensor],
    opts: Any,
    *call: int,
) -> Work:
    """Finish a call whose step has to wait.

    Args: call: address, bytes, code, word, first phase and step.
    """
    word = call[3]
    remaining = partial(native.remaining_steps, steps, *call)
    return queue.go_on(decode(word), word, remaining, tensors, opts, plain.take_over)


def _dtypes() -> dict[torch.dtype, int]:
    """Return for each dtype its number, its bytes and the code of its sum + 1, 8 bits each.

    Complex tensors may have a conjugation that is not in memory, so Python looks at them.
    """
    return {
        dtype: number | dtype.itemsize << 8 | (CODES.get((dtype, "sum"), -1) + 1) << 16
        for dtype, number in DTYPE_NUMBERS.items()
        if not dtype.is_complex
    }


def _dtype_bits(dtype: torch.dtype) -> int:
    return DTYPE_NUMBERS[dtype] << 9


def _operations_are_readable() -> bool:
    """Return True if the hash of an operation is its number, which is slower to read."""
    options = Options.AllreduceOptions()
    for operation in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        options.reduceOp = operation
        if hash(options.reduceOp) != operation.value:
            return False
    return (ReduceOp.SUM.value, ReduceOp.AVG.value) == (0, 1)
