"""The collectives in shared memory, with the methods that torch.distributed calls.

all_reduce ──> _supports? ──┬── yes: _run ─────> call_queue.py
                            └── no:  _by_gloo ─> gloo_calls.py

Each method flattens tensors, and gives the steps of `collectives.py` to `_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Work

from shoal.platform.tensors import DTYPES
from shoal.platform.torch_private.c10d import ALL_GATHER_FLAT, REDUCE_SCATTER_FLAT
from shoal.shm_backend import collectives, inter_host
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.call_queue import CallQueue
from shoal.shm_backend.gloo_calls import GlooCalls
from shoal.shm_backend.inter_host import InterHost
from shoal.shm_backend.native import CODES, LARGE_BYTES, NativeCalls
from shoal.shm_backend.phase_board import PhaseBoard, Steps
from shoal.shm_backend.reduce_kernels import can_reduce
from shoal.shm_backend.tensor_utils import flattened, rows_of, shares_memory, write_back
from shoal.shm_backend.torch_calls import torch_call, trace
from shoal.trace.recorder import InFlight

# The keys are the integers of the enum: a lookup by them takes half the time.
OPERATIONS = {
    ReduceOp.SUM.value: "sum",
    ReduceOp.AVG.value: "avg",
    ReduceOp.PRODUCT.value: "product",
    ReduceOp.MIN.value: "min",
    ReduceOp.MAX.value: "max",
}
MAX_CACHED_CALLS = 4096  # entries in each cache of a group


class CollectiveOps(GlooCalls):
    """all_reduce, broadcast, all_gather, reduce_scatter, barrier. `ShoalGroup` sets the attributes.

    Calls that shared memory cannot carry are Gloo's; its error says what is wrong with the others.
    """

    # Signatures with their encodings, by the arguments of `_call`.
    _signatures: dict[tuple[Any, ...], tuple[CallSignature, int]]
    _queue: CallQueue | None
    _board: PhaseBoard
    _inter_host: InterHost | None
    _native_calls: NativeCalls | None

    @property
    def on_one_host(self) -> bool:
        """True if all ranks of the group use one phase board."""
        return self._queue is not None and self._inter_host is None

    @torch_call("allreduce_")
    def allreduce(self, tensors: Any, opts: Any) -> Work:
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if len(tensors) != 1 or not self._supports(tensors[0], operation, over_hosts=True):
            return self._by_gloo("allreduce", tensors, opts)
        flat = flattened(tensors[0])
        steps = partial(self._all_reduce_steps, flat, operation)
        call = self._call("all_reduce", flat, operation)
        return self._run(call, steps, tensors, (flat,), tensors, opts)

    def _all_reduce_steps(self, flat: Tensor, operation: str) -> Steps:
        """Return the steps of an all-reduce: compiled, in Python, or over several hosts."""
        if self._inter_host is not None:
            return inter_host.all_reduce(self._board, self._inter_host, flat, operation)
        code = CODES.get((flat.dtype, operation))
        if code is not None and self._native_calls is not None:
            return self._native_calls.all_reduce(flat, code)
        return collectives.all_reduce(self._board, flat, operation)

    @torch_call("broadcast_")
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        root = opts.rootRank
        in_group = len(tensors) == 1 and 0 <= root < self.size()
        if not in_group or not self._supports(tensors[0]):
            return self._by_gloo("broadcast", tensors, opts)
        flat = flattened(tensors[0])
        steps = partial(self._broadcast_steps, flat, root)
        call = self._call("broadcast", flat, root=root)
        return self._run(call, steps, tensors, (flat,), tensors, opts)

    def _broadcast_steps(self, flat: Tensor, root: int) -> Steps:
        """Return the steps of a broadcast: compiled for a small tensor, else in Python."""
        if self._native_calls is not None and flat.nbytes < LARGE_BYTES:
            return self._native_calls.broadcast(flat, root)
        return collectives.broadcast(self._board, flat, root)

    @torch_call("allgather_")
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        if len(outputs) == len(inputs) == 1 and self._has_rows(outputs[0], inputs[0]):
            return self._all_gather(outputs[0], inputs[0], outputs[0], opts)
        return self._by_gloo("allgather", outputs, inputs, opts)

    @torch_call("_allgather_base_")
    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        rows = rows_of(output, self.size())
        if self._has_rows(rows, tensor):
            return self._all_gather(rows, tensor, [output], opts)
        return self._by_gloo(ALL_GATHER_FLAT, output, tensor, opts)

    all_gather_single = _allgather_base

    @torch_call("allgather_into_tensor_coalesced_")
    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        return _one_by_one(self._allgather_base, outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(
        self, rows: Sequence[Tensor], tensor: Tensor, results: Sequence[Tensor], opts: Any
    ) -> Work:
        flat, flat_rows = flattened(tensor), [flattened(row) for row in rows]
        steps = partial(collectives.all_gather, self._board, flat, flat_rows)
        return self._run(self._call("all_gather", flat), steps, rows, flat_rows, results, opts)

    @torch_call("reduce_scatter_")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        is_single = len(outputs) == len(inputs) == 1
        if is_single and self._has_rows(inputs[0], outputs[0], operation):
            return self._reduce_scatter(outputs, inputs[0], operation, opts)
        return self._by_gloo("reduce_scatter", outputs, inputs, opts)

    @torch_call("_reduce_scatter_base_")
    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        rows = rows_of(tensor, self.size())
        if self._has_rows(rows, output, operation):
            return self._reduce_scatter([output], rows, operation, opts)
        return self._by_gloo(REDUCE_SCATTER_FLAT, output, tensor, opts)

    reduce_scatter_single = _reduce_scatter_base

    @torch_call("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        return _one_by_one(self._reduce_scatter_base, outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], rows: Sequence[Tensor], operation: str, opts: Any
    ) -> Work:
        flat, flat_rows = flattened(outputs[0]), [flattened(row) for row in rows]
        steps = partial(collectives.reduce_scatter, self._board, flat, flat_rows, operation)
        call = self._call("reduce_scatter", flat, operation)
        return self._run(call, steps, outputs, (flat,), outputs, opts)

    @torch_call("barrier")
    def barrier(self, opts: Any) -> Work:
        if not self.on_one_host:
            return self._by_gloo("barrier", opts)
        call = self._signatures.setdefault(
            (), (CallSignature("barrier"), CallSignature("barrier").encoded)
        )
        return self._run(call, partial(collectives.barrier, self._board), (), (), (), opts)

    def _supports(
        self, tensor: Tensor, operation: str | None = None, over_hosts: bool = False
    ) -> bool:
        """Return True if shared memory can carry this call.

        Args:
            operation: of a reduction; None for a call that only copies.
            over_hosts: the call has an implementation for several hosts.
        """
        return (
            self._queue is not None
            and (over_hosts or self._inter_host is None)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and (
                tensor.dtype in DTYPES if operation is None else can_reduce(tensor.dtype, operation)
            )
        )

    def _has_rows(
        self, rows: Sequence[Tensor], tensor: Tensor, operation: str | None = None
    ) -> bool:
        """Return True if shared memory can carry a call with a row like `tensor` for each rank."""
        length, dtype = tensor.numel(), tensor.dtype
        return (
            self._supports(tensor, operation)
            and len(rows) == self.size()
            and all(row.numel() == length and row.dtype == dtype for row in rows)
        )

    def _call(
        self, kind: str, tensor: Tensor, operation: str = "", root: int = 0
    ) -> tuple[CallSignature, int]:
        """Return the signature of a call and its encoding, from the cache if possible."""
        key = (kind, tensor.dtype, tensor.numel(), operation, root)
        entry = self._signatures.get(key)
        if entry is None:
            if len(self._signatures) > MAX_CACHED_CALLS:
                self._signatures.clear()
            call = CallSignature(kind, tensor.dtype, tensor.numel(), operation, root)
            entry = self._signatures[key] = call, call.encoded
        return entry

    def _run(
        self,
        call: tuple[CallSignature, int],
        start: Callable[[], Steps],
        outputs: Sequence[Tensor],
        flats: Sequence[Tensor],
        results: Sequence[Tensor],
        opts: Any,
    ) -> Work:
        """Make a call on shared memory, and copy results back where a flat tensor is a copy.

        Args:
            call: the signature and its encoding.
            start: makes the steps.
            outputs: the tensors of the caller that the call writes.
            flats: the flat tensors of `outputs`, which the steps write.
            results: the value of the call's future.
        """
        if torch.is_inference_mode_enabled():
            # A thread may finish the call, and it is not in that mode.
            with torch.inference_mode(False):
                return self._run(call, start, outputs, flats, results, opts)
        assert self._queue is not None
        if not all(map(shares_memory, flats, outputs)):
            start = partial(_copy_back, flats, outputs, start)
        if self.recorder is None:
            return self._queue.call(*call, start, results, opts)
        size_bytes = call[0].length * call[0].dtype.itemsize
        flight = self.recorder.start(call[0].kind, size_bytes, self._label, self._peer_ranks())
        steps = partial(_finish_after, flight, start)
        make = partial(self._queue.call, *call, steps, results, opts)
        return trace(self.recorder, flight, make)


def _one_by_one(
    call: Callable[..., Work], outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
) -> Work:
    """Make a call for each output and its input; return the handle of the last one.

    torch's functional collectives, and so DTensor, pass one of each.
    """
    *earlier, last = zip(outputs, inputs, strict=True)
    for pair in earlier:
        call(*pair, opts).wait()
    return call(*last, opts)


def _copy_back(
    flats: Sequence[Tensor], tensors: Sequence[Tensor], start: Callable[[], Steps]
) -> Steps:
    """Take the steps, then copy each flat tensor that is a copy back into its tensor."""
    yield from start()
    for flat, tensor in zip(flats, tensors, strict=True):
        if not shares_memory(flat, tensor):
            write_back(flat, tensor)


def _finish_after(flight: InFlight, start: Callable[[], Steps]) -> Steps:
    """Take the steps, then record the end of the call."""
    yield from start()
    flight.finish()
