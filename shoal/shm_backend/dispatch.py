"""The choice between shared memory and Gloo for each call, and the record of the call in a trace.

all_reduce ──> _supports? ──┬── yes: _run, _run_each ────> call_queue.py
                            └── no:  _fall_back_to_gloo ─> Gloo
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Work

from shoal.platform.tensors import DTYPES
from shoal.platform.torch_private.c10d import backend_for
from shoal.shm_backend import collectives
from shoal.shm_backend.announced_work import AnnouncedWork
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.call_queue import CallQueue
from shoal.shm_backend.gloo_progress import GlooProgress, WatchedWork
from shoal.shm_backend.inter_host import InterHost
from shoal.shm_backend.native import NativeCalls
from shoal.shm_backend.phase_board import PhaseBoard, Steps
from shoal.shm_backend.reduce_kernels import can_reduce
from shoal.shm_backend.tensor_utils import pairs, shares_memory, write_back
from shoal.shm_backend.traced_work import trace_steps, trace_work
from shoal.trace.recorder import InFlight, Recorder

logger = logging.getLogger("shoal.comm")
# The keys are the integers of the enum: a lookup by them takes half the time.
OPERATIONS = {
    ReduceOp.SUM.value: "sum",
    ReduceOp.AVG.value: "avg",
    ReduceOp.PRODUCT.value: "product",
    ReduceOp.MIN.value: "min",
    ReduceOp.MAX.value: "max",
    ReduceOp.BAND.value: "band",
    ReduceOp.BOR.value: "bor",
    ReduceOp.BXOR.value: "bxor",
}
MAX_CACHED_CALLS = 4096  # entries in each cache of a group
# torch's stubs know each collective in several forms, of which torch.distributed uses one.
Base: Any = dist.ProcessGroup


class CollectiveDispatch(Base):
    """Members that every kind of collective needs of its group. `ShoalGroup` sets the attributes.

    Attributes:
        recorder: records every call while a trace is taken, else None.
    """

    recorder: Recorder | None
    _label: str
    _ranks: list[int]
    # Signatures with their encodings, by the arguments of `_call`.
    _signatures: dict[tuple[Any, ...], tuple[CallSignature, int]]
    _gloo_progress: GlooProgress
    _queue: CallQueue | None
    _board: PhaseBoard
    _inter_host: InterHost | None
    _native_calls: NativeCalls | None

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

    def _takes(self, tensors: Sequence[Tensor], root: int) -> bool:
        """Return True for one tensor and a root in the group.

        Other calls go to Gloo, whose error says what is wrong with them.
        """
        return len(tensors) == 1 and 0 <= root < self.size()

    def _all_same_size(self, tensor: Tensor, rows: Sequence[Tensor]) -> bool:
        """Return True if there is a row with the length and dtype of `tensor` for each rank.

        Other calls go to Gloo, whose error says what is wrong with them.
        """
        length, dtype = tensor.numel(), tensor.dtype
        return len(rows) == self.size() and all(
            row.numel() == length and row.dtype == dtype for row in rows
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
        size_bytes: int = 0,
    ) -> Work:
        """Make a call on shared memory, and copy results back where a flat tensor is a copy.

        Args:
            call: the signature and its encoding.
            start: makes the steps.
            outputs: the tensors of the caller that the call writes.
            flats: the flat tensors of `outputs`, which the steps write.
            results: the value of the call's future.
            size_bytes: for the trace; computed from the signature if 0.
        """
        if torch.is_inference_mode_enabled():
            # A thread may finish the call, and it is not in that mode.
            with torch.inference_mode(False):
                return self._run(call, start, outputs, flats, results, opts, size_bytes)
        assert self._queue is not None
        queue = self._queue
        begin = start
        if not all(shares_memory(flat, out) for flat, out in zip(flats, outputs, strict=True)):
            begin = partial(_copy_back, flats, outputs, start)
        if self.recorder is None:
            return queue.call(*call, begin, results, opts)
        size_bytes = size_bytes or call[0].length * call[0].dtype.itemsize
        flight = self.recorder.start(call[0].kind, size_bytes, self._label, self._peer_ranks())
        return trace_steps(
            self.recorder, flight, begin, lambda steps: queue.call(*call, steps, results, opts)
        )

    def _run_each(
        self,
        kind: str,
        starts: list[tuple[Tensor, Callable[[], Steps]]],
        outputs: Sequence[Tensor],
        flats: Sequence[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        operation: str = "",
    ) -> Work:
        """Make several calls of one kind in sequence, with one handle for all.

        Args: starts: for each call the tensor of its signature, and the function that makes its
            steps.
        """
        calls = [(self._call(kind, flat, operation), start) for flat, start in starts]
        if len(calls) == 1:
            return self._run(*calls[0], outputs, flats, results, opts)
        barrier = CallSignature("barrier")
        first = calls[0][0] if calls else (barrier, barrier.encoded)
        size_bytes = sum(call.length * call.dtype.itemsize for (call, _), _ in calls)
        steps = partial(_in_sequence, self._board, calls)
        return self._run(first, steps, outputs, flats, results, opts, size_bytes)

    def _fall_back_to_gloo(self, name: str, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Make a call of Gloo. `name` is the method of torch's backend."""
        if self._queue is not None:
            logger.debug(
                "%s: Gloo does %s of %s", self, name, tensors[0].dtype if tensors else "nothing"
            )
        # The backend is asked directly: the base class would call this method again.
        backend = backend_for(self, tensors[0].device if tensors else torch.device("cpu"))
        start = getattr(backend, name)
        call: Callable[[], Work] = partial(self._announced, name, start, tensors, args)
        if self.recorder is None:
            return call()
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        flight = self._trace_start(self.recorder, name, size_bytes, args)
        return trace_work(self.recorder, flight, call, has_future=True)

    def _announced(
        self,
        name: str,
        start: Callable[..., Work],
        tensors: Sequence[Tensor],
        args: tuple[Any, ...],
    ) -> Work:
        """Start a call of Gloo, and show the other ranks of the host that Gloo makes it.

        A rank whose call is in shared memory would wait in vain for this one.
        """
        if tensors and not tensors[0].is_cpu:
            return start(*args)
        if self._queue is None or self._inter_host is not None:
            self._gloo_progress.begin(name, tensors)
            return WatchedWork(start(*args))
        work = start(*args)
        if not tensors:
            return work
        dtype = tensors[0].dtype
        signature = CallSignature("gloo", dtype if dtype in DTYPES else torch.uint8)
        steps = partial(collectives.barrier, self._board)
        shown = self._queue.call(signature, signature.encoded, steps, (), args[-1])
        return work if shown.is_completed() else AnnouncedWork(work, shown)

    def _fall_back_each(
        self, name: str, tensors: Sequence[Tensor], calls: list[tuple[Any, ...]]
    ) -> Work:
        """Make several calls of Gloo in sequence, and return the handle of the last one."""
        *earlier, last = calls
        for args in earlier:
            self._fall_back_to_gloo(name, tensors, *args).wait()
        return self._fall_back_to_gloo(name, tensors, *last)

    # --- while a trace is taken

    def _trace_start(
        self, recorder: Recorder, name: str, size_bytes: int, args: tuple[Any, ...]
    ) -> InFlight:
        """Record the start of a call of Gloo, or of a message.

        Args: args: those of a collective; of a message (tensor, peer or None, tag).
        """
        if name not in ("send", "recv"):
            root = int(getattr(args[-1], "rootRank", 0))
            return recorder.start(
                f"{name} (Gloo)", size_bytes, self._label, self._ranks_waited_for(name, root)
            )
        if args[1] is None:
            return recorder.start(
                "recv from any",
                size_bytes,
                f"{self._label}: any > {self.rank()}",
                self._peer_ranks(),
            )
        here, there = self._ranks[self.rank()], self._ranks[args[1]]
        ends = (here, there) if name == "send" else (there, here)
        # Both ends record the same text, by which the trace matches a send with its recv.
        match = f"{self._label}: {ends[0]} > {ends[1]}, tag {args[2]}"
        word = "to" if name == "send" else "from"
        waited_for = () if name == "send" else (there,)
        return recorder.start(f"{name} {word} {there}", size_bytes, match, waited_for)

    def _peer_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of all other ranks of the group."""
        return tuple(rank for rank in self._ranks if rank != self._ranks[self.rank()])

    def _ranks_waited_for(self, kind: str, root: int) -> tuple[int, ...]:
        """Return the global ranks that this rank waits for in a call of Gloo of this kind."""
        if kind in ("broadcast", "scatter"):
            return () if root == self.rank() else (self._ranks[root],)
        if kind in ("reduce", "gather"):
            return self._peer_ranks() if root == self.rank() else ()
        return self._peer_ranks()


def _copy_back(
    flats: Sequence[Tensor], tensors: Sequence[Tensor], start: Callable[[], Steps]
) -> Steps:
    """Take the steps, then copy each flat tensor that is a copy back into its tensor."""
    yield from start()
    for flat, tensor in pairs(flats, tensors):
        if not shares_memory(flat, tensor):
            write_back(flat, tensor)


def _in_sequence(
    board: PhaseBoard, calls: Sequence[tuple[tuple[CallSignature, int], Callable[[], Steps]]]
) -> Steps:
    """Take the steps of all calls, one call after the other."""
    for call, start in calls:
        board.begin(*call)
        yield from start()
