"""How a call is made: on shared memory where it can be, else Gloo's affair; and what a trace is
told of it.

all_reduce ──> _does? ──┬── yes: _run, _run_each ──> order.py
                        └── no:  _leave ───────────> Gloo
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Work

from shoal.platform.tensors import DTYPES
from shoal.platform.torch_private.c10d import backend_for
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.call_queue import CallQueue
from shoal.shm_backend.inter_host import InterHost
from shoal.shm_backend.native import NativeCalls
from shoal.shm_backend.phase_board import PhaseBoard, Steps
from shoal.shm_backend.reduce_kernels import can_reduce
from shoal.shm_backend.tensor_utils import is_own, pairs
from shoal.shm_backend.traced_work import watch_steps, watch_work
from shoal.trace.recorder import InFlight, Recorder

logger = logging.getLogger("shoal.comm")
OPERATIONS = {  # by their numbers, which are found in half the time
    ReduceOp.SUM.value: "sum",
    ReduceOp.AVG.value: "avg",
    ReduceOp.PRODUCT.value: "product",
    ReduceOp.MIN.value: "min",
    ReduceOp.MAX.value: "max",
    ReduceOp.BAND.value: "band",
    ReduceOp.BOR.value: "bor",
    ReduceOp.BXOR.value: "bxor",
}
MAX_CACHED_CALLS = 4096  # calls that a group keeps in mind
Base: Any = (
    dist.ProcessGroup
)  # its stubs know each call in several forms, of which torch.distributed uses one


class FastPath(NamedTuple):
    """An all-reduce that was made before: its compiled steps. Each microsecond of Python counts."""

    call: tuple[CallSignature, int]
    steps: Callable[[Tensor], Steps]


class CollectiveDispatch(Base):
    """What every kind of call needs of its group. `ShoalGroup` sets the attributes."""

    recorder: Recorder | None
    _label: str
    _ranks: list[int]
    _signatures: dict[tuple[Any, ...], tuple[CallSignature, int]]
    _fast_paths: dict[tuple[torch.dtype, int, int], FastPath]
    _queue: CallQueue | None
    _board: PhaseBoard
    _inter_host: InterHost | None
    _native: NativeCalls | None

    def _supports(
        self, tensor: Tensor, operation: str | None = None, over_hosts: bool = False
    ) -> bool:
        return (
            self._queue is not None
            and (over_hosts or self._inter_host is None)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and (
                tensor.dtype in DTYPES if operation is None else can_reduce(tensor.dtype, operation)
            )
        )

    def _all_same_size(self, tensor: Tensor, rows: Sequence[Tensor]) -> bool:
        """Whether there is a row as long as `tensor` for each rank; what is wrong otherwise,
        Gloo says.
        """
        length, dtype = tensor.numel(), tensor.dtype
        return len(rows) == self.size() and all(
            row.numel() == length and row.dtype == dtype for row in rows
        )

    def _call(
        self, kind: str, tensor: Tensor, operation: str = "", root: int = 0
    ) -> tuple[CallSignature, int]:
        key = (kind, tensor.dtype, tensor.numel(), operation, root)
        found = self._signatures.get(key)
        if found is None:
            if len(self._signatures) > MAX_CACHED_CALLS:
                self._signatures.clear()
            call = CallSignature(kind, tensor.dtype, tensor.numel(), operation, root)
            found = self._signatures[key] = call, call.encoded
        return found

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
        assert self._queue is not None
        begin, order, at_once = start, self._queue, not opts.asyncOp
        for flat, output in zip(flats, outputs, strict=True):
            if not is_own(flat, output):
                begin = partial(_copy_back, flats, outputs, start)
                break
        if self.recorder is None:
            return order.call(*call, begin, results, at_once)
        kind, root = call[0].kind, call[0].root
        size_bytes = size_bytes or call[0].length * call[0].dtype.itemsize
        flight = self.recorder.start(
            kind, size_bytes, self._label, self._ranks_waited_for(kind, root)
        )
        return watch_steps(
            self.recorder, flight, begin, lambda steps: order.call(*call, steps, results, at_once)
        )

    def _run_each(
        self,
        kind: str,
        each: list[tuple[Tensor, Callable[[], Steps]]],
        outputs: Sequence[Tensor],
        flats: Sequence[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        operation: str = "",
    ) -> Work:
        """One call after the other, and one handle for all."""
        calls = [(self._call(kind, flat, operation), start) for flat, start in each]
        if len(calls) == 1:
            return self._run(*calls[0], outputs, flats, results, opts)
        first = (
            calls[0][0] if calls else (CallSignature("barrier"), CallSignature("barrier").encoded)
        )
        size_bytes = sum(call.length * call.dtype.itemsize for (call, _), _ in calls)
        steps = partial(_in_sequence, self._board, calls)
        return self._run(first, steps, outputs, flats, results, opts, size_bytes)

    def _fall_back_to_gloo(self, name: str, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Somebody else's affair: Gloo's."""
        if self._queue is not None:
            logger.debug(
                "%s: Gloo does %s of %s", self, name, tensors[0].dtype if tensors else "nothing"
            )
        # Asked for by name: the base class would ask this one again.
        backend = backend_for(self, tensors[0].device if tensors else torch.device("cpu"))
        call: Callable[[], Work] = partial(getattr(backend, name), *args)
        if self.recorder is None:
            return call()
        flight = self._trace_start(
            self.recorder, name, sum(tensor.nbytes for tensor in tensors), args
        )
        return watch_work(self.recorder, flight, call, tells=True)

    def _leave_each(
        self, name: str, tensors: Sequence[Tensor], calls: list[tuple[Any, ...]]
    ) -> Work:
        *before, last = calls
        for args in before:
            self._fall_back_to_gloo(name, tensors, *args).wait()
        return self._fall_back_to_gloo(name, tensors, *last)

    # --- while a trace is taken

    def _trace_start(
        self, recorder: Recorder, name: str, size_bytes: int, args: tuple[Any, ...]
    ) -> InFlight:
        """A call of Gloo's, or a message, begins."""
        if name not in ("send", "recv"):
            root = int(getattr(args[-1], "rootRank", 0))
            return recorder.start(
                f"{name} (Gloo)", size_bytes, self._label, self._ranks_waited_for(name, root)
            )
        if args[1] is None:
            others = tuple(rank for rank in self._ranks if rank != self._ranks[self.rank()])
            return recorder.start(
                "recv from any", size_bytes, f"{self._label}: any > {self.rank()}", others
            )
        here, there = self._ranks[self.rank()], self._ranks[args[1]]
        ends = (here, there) if name == "send" else (there, here)
        meeting = f"{self._label}: {ends[0]} > {ends[1]}, tag {args[2]}"
        word = "to" if name == "send" else "from"
        return recorder.start(
            f"{name} {word} {there}", size_bytes, meeting, () if name == "send" else (there,)
        )

    def _ranks_waited_for(self, kind: str, root: int) -> tuple[int, ...]:
        """Whom a rank has to wait for in such a call."""
        others = tuple(rank for rank in self._ranks if rank != self._ranks[self.rank()])
        if kind in ("broadcast", "scatter"):
            return () if root == self.rank() else (self._ranks[root],)
        if kind in ("reduce", "gather"):
            return others if root == self.rank() else ()
        return others


def _copy_back(
    flats: Sequence[Tensor], tensors: Sequence[Tensor], start: Callable[[], Steps]
) -> Steps:
    """The steps, and then the numbers of copies back to where they belong."""
    yield from start()
    for flat, tensor in pairs(flats, tensors):
        if not is_own(flat, tensor):
            tensor.data.copy_(flat.view(tensor.shape))


def _in_sequence(
    board: PhaseBoard, calls: Sequence[tuple[tuple[CallSignature, int], Callable[[], Steps]]]
) -> Steps:
    for call, start in calls:
        board.begin(*call)
        yield from start()
