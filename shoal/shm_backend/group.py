"""The process group of backend "shoal": collectives in shared memory, and Gloo for the rest.

all_reduce ──> _supports? ──┬── yes: _run ─────> call_queue.py
                            └── no:  _by_gloo ─> gloo_calls.py

Each collective flattens its tensors, and gives the steps of `collectives.py` to `_run`. All calls
of a group whose ranks are on several hosts are Gloo's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ReduceOp, Store, Work

from shoal.errors import UsageError
from shoal.platform.cgroups import usable_cores
from shoal.platform.tensors import DTYPES
from shoal.platform.torch_private.c10d import (
    ALL_GATHER_FLAT,
    REDUCE_SCATTER_FLAT,
    add_backend,
    make_gloo,
    timeout_of,
)
from shoal.platform.torch_private.subclasses import is_fake
from shoal.shm_backend import collectives
from shoal.shm_backend.call_queue import CallQueue, CompletedWork, traced
from shoal.shm_backend.collectives import can_reduce, reduce_into
from shoal.shm_backend.gloo_calls import GlooCalls, is_flat_contiguous
from shoal.shm_backend.native import CODES, LARGE_BYTES, NativeCalls
from shoal.shm_backend.native import MAX_RANKS as MAX_NATIVE_RANKS
from shoal.shm_backend.phase_board import MAX_RANKS, CallSignature, PhaseBoard, Steps, signature
from shoal.shm_backend.rendezvous import Topology, rendezvous
from shoal.shm_backend.torch_calls import torch_call
from shoal.shm_backend.waiter import SPIN_S, PeerLiveness, Waiter
from shoal.trace.recorder import InFlight, Recorder
from shoal.watchdog.progress_writer import own_progress

logger = logging.getLogger("shoal.comm")
GLOO = dist.ProcessGroup.BackendType.GLOO
# The keys are the integers of the enum: a lookup by them takes half the time.
OPERATIONS = {
    ReduceOp.SUM.value: "sum",
    ReduceOp.AVG.value: "avg",
    ReduceOp.PRODUCT.value: "product",
    ReduceOp.MIN.value: "min",
    ReduceOp.MAX.value: "max",
}
# torch's stubs know each collective in several forms, of which torch.distributed uses one.
Base: Any = dist.ProcessGroup


def _gloo_method(name: str) -> Any:
    def method(self: ShoalGroup, *args: Any) -> Work:
        return self._by_gloo(name, *args)

    method.__name__ = name
    return torch_call(f"{name}_")(method)


class ShoalGroup(Base):
    """A process group on shared memory, with Gloo as its second backend.

    The base class hands the remaining methods of torch to Gloo without a progress word. Where C++
    waits for such a call, it may hold the interpreter's lock, which Gloo's thread may need: every
    collective that functional collectives call has a method here.

    Args:
        store: of this group alone.
        rank, size: this rank in the group, and the number of ranks.
        timeout: of each wait for other ranks.
        ranks: the global ranks of the group, for messages; empty for all ranks of the world.
        label: name of the group in traces, the same on all its ranks.
        shared_memory: False to leave all calls to Gloo.

    Attributes:
        recorder: records every call while a trace is taken, else None.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        label: str = "",
        shared_memory: bool = True,
    ) -> None:
        super().__init__(rank, size)
        self.recorder: Recorder | None = None
        self._label = label
        gloo = make_gloo(PrefixStore("gloo", store), rank, size, timeout)
        add_backend(self, torch.device("cpu"), GLOO, gloo)
        # Without the group in it: the waiter would keep the group alive.
        self._timeout_s = lambda: timeout_of(gloo).total_seconds()
        self._ranks = list(ranks) or list(range(size))
        self._gloo_calls = GlooCalls(gloo, label, self._ranks, rank)
        self._board: PhaseBoard
        self._queue: CallQueue | None = None
        self._peers: PeerLiveness | None = None
        self._native_calls: NativeCalls | None = None
        if shared_memory:
            self._choose_transport(rendezvous(PrefixStore("meeting", store), rank, size))

    def _choose_transport(self, topology: Topology) -> None:
        """Use shared memory if all ranks are on one host and can open each other's."""
        rank, size = self.rank(), self.size()
        if topology.pids:
            self._peers = self._gloo_calls.peers = PeerLiveness(topology.pids)
        if topology.memory is None or size > MAX_RANKS:
            # A reason of the topology is a defect of the machine. The others are by design.
            level = logging.WARNING if topology.reason else logging.DEBUG
            reason = topology.reason or f"{size} ranks on {topology.num_hosts} hosts"
            logger.log(level, "%s: Gloo does all: %s", self, reason)
            return
        peers = self._peers or PeerLiveness({})
        progress = own_progress().join_group(f"{self._label} on {self._ranks}", self._ranks)
        self._board = PhaseBoard(rank, topology.memory, topology.attached, self._ranks, progress)
        # With more ranks than cores, spinning would take the core from the rank that is late.
        spin_s = SPIN_S if size <= usable_cores() else 0.0
        if topology.compiled and 1 < size <= MAX_NATIVE_RANKS:
            self._native_calls = NativeCalls(self._board, yields=spin_s == 0)
        waiter = Waiter(self._board, peers, self._timeout_s, spin_s)
        self._queue = CallQueue(waiter, f"{self._ranks}")

    def __repr__(self) -> str:
        return f"group of ranks {self._ranks}"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "shoal"

    @property
    def uses_shared_memory(self) -> bool:
        """True if the group's collectives do not go through Gloo; they add in the order of ranks,
        so the bits of a sum do not depend on the position in the tensor.
        """
        return self._queue is not None

    def shutdown(self) -> None:
        """Finish the calls that have been made, and leave the group."""
        if self._queue is not None and self._queue.close():
            # Later calls are refused, so nothing reads this memory any more.
            self._native_calls = None
            self._board.close()
        if self._peers is not None:
            self._peers.close()
        super().shutdown()

    # --- calls of Gloo

    allreduce_coalesced = _gloo_method("allreduce_coalesced")
    reduce = _gloo_method("reduce")
    gather = _gloo_method("gather")
    scatter = _gloo_method("scatter")
    alltoall = _gloo_method("alltoall")
    alltoall_base = all_to_all_single = _gloo_method("alltoall_base")

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        return self._gloo_calls.message("send", tensors[0], receiver, tag, self.recorder)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        return self._gloo_calls.message("recv", tensors[0], sender, tag, self.recorder)

    def _by_gloo(self, name: str, *args: Any) -> Work:
        """Make a collective of Gloo.

        Args:
            name: the method of torch's backend.
            args: its arguments: tensors in lists, and torch's options.
        """
        return self._gloo_calls.collective(name, args, self.recorder)

    def _exchange_and_reduce(self, output: Tensor, tensor: Tensor, operation: str) -> Work:
        """Send each rank its row, and reduce what comes, in the order of ranks.

        Gloo's own reduce-scatter is an all-reduce, which sends twice as much.
        """
        flat, received = flattened(output), torch.empty_like(tensor.data)
        as_bytes = [flattened(each).view(torch.uint8) for each in (received, tensor)]
        self._by_gloo("alltoall_base", *as_bytes, [], [], dist.AllToAllOptions()).wait()
        reduce_into(flat, rows_of(received, self.size()), operation)
        if not _shares_memory(flat, output):
            output.data.copy_(flat.view(output.shape))
        return CompletedWork([output])

    # --- collectives in shared memory

    @torch_call("allreduce_")
    def allreduce(self, tensors: Any, opts: Any) -> Work:
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if len(tensors) != 1 or not self._supports(tensors[0], operation):
            return self._by_gloo("allreduce", tensors, opts)
        flat = flattened(tensors[0])
        code, native = CODES.get((flat.dtype, operation)), self._native_calls
        if code is None or native is None:
            steps = partial(collectives.all_reduce, self._board, flat, operation)
        else:
            steps = partial(native.all_reduce, flat, code)
        call = signature("all_reduce", flat.dtype, flat.numel(), operation)
        return self._run(call, steps, tensors, (flat,), tensors, opts)

    @torch_call("broadcast_")
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        root = opts.rootRank
        in_group = len(tensors) == 1 and 0 <= root < self.size()
        if not in_group or not self._supports(tensors[0]):
            return self._by_gloo("broadcast", tensors, opts)
        flat = flattened(tensors[0])
        if self._native_calls is not None and flat.nbytes < LARGE_BYTES:
            steps = partial(self._native_calls.broadcast, flat, root)
        else:
            steps = partial(collectives.broadcast, self._board, flat, root)
        call = signature("broadcast", flat.dtype, flat.numel(), root=root)
        return self._run(call, steps, tensors, (flat,), tensors, opts)

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
        call = signature("all_gather", flat.dtype, flat.numel())
        return self._run(call, steps, rows, flat_rows, results, opts)

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
        if (
            self._queue is None
            and len(rows) > 1
            and not opts.asyncOp
            and can_reduce(tensor.dtype, operation)
        ):
            return self._exchange_and_reduce(output, tensor, operation)
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
        call = signature("reduce_scatter", flat.dtype, flat.numel(), operation)
        return self._run(call, steps, outputs, (flat,), outputs, opts)

    @torch_call("barrier")
    def barrier(self, opts: Any) -> Work:
        if self._queue is None:
            return self._by_gloo("barrier", opts)
        steps = partial(collectives.barrier, self._board)
        return self._run(signature("barrier", torch.uint8, 0), steps, (), (), (), opts)

    def _supports(self, tensor: Tensor, operation: str | None = None) -> bool:
        """Return True if shared memory can carry this call.

        Args: operation: of a reduction; None for a call that only copies.
        """
        return (
            self._queue is not None
            and tensor.is_cpu
            and tensor.layout is torch.strided
            # A thread may write the result, and only in that mode may such tensors be written.
            and not (torch.is_inference_mode_enabled() or tensor.is_inference())
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
            and all(
                row.numel() == length and row.dtype == dtype and not row.is_inference()
                for row in rows
            )
        )

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
        assert self._queue is not None
        if not all(map(_shares_memory, flats, outputs)):
            start = partial(_copy_back, flats, outputs, start)
        if self.recorder is None:
            return self._queue.call(*call, start, results, opts)
        size_bytes = call[0].length * call[0].dtype.itemsize
        peers = self._gloo_calls.peer_ranks()
        flight = self.recorder.start(call[0].kind, size_bytes, self._label, peers)
        steps = partial(_finish_after, flight, start)
        make = partial(self._queue.call, *call, steps, results, opts)
        return traced(self.recorder, flight, make)


def flattened(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a flat tensor: a view if it is contiguous, else a copy.

    Autograd does not record the view.
    """
    data = tensor.data
    if is_flat_contiguous(data):
        return data if data.dim() == 1 else data.view(-1)
    if is_fake(data):
        raise UsageError(
            "a fake tensor has no numbers to send: make the call outside of FakeTensorMode, or "
            "over a group of backend 'fake'"
        )
    flat = torch.empty(data.numel(), dtype=data.dtype)
    flat.copy_(data.reshape(-1))
    return flat


def rows_of(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Divide a flat buffer into `size` rows; no rows if it cannot be divided evenly."""
    if tensor.numel() % size or not tensor.is_contiguous():
        return ()
    return tensor.data.view(size, tensor.numel() // size).unbind()


def _shares_memory(flat: Tensor, tensor: Tensor) -> bool:
    """Return True if `flat`, made by `flattened(tensor)`, is a view and not a copy."""
    return flat.data_ptr() == tensor.data_ptr()


def _copy_back(
    flats: Sequence[Tensor], tensors: Sequence[Tensor], start: Callable[[], Steps]
) -> Steps:
    """Take the steps, then copy each flat tensor that is a copy back into its tensor."""
    yield from start()
    for flat, tensor in zip(flats, tensors, strict=True):
        if not _shares_memory(flat, tensor):
            tensor.data.copy_(flat.view(tensor.shape))


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


def _finish_after(flight: InFlight, start: Callable[[], Steps]) -> Steps:
    """Take the steps, then record the end of the call."""
    yield from start()
    flight.finish()
