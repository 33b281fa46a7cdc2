"""The process group: what torch.distributed calls. Everything is either a call on shared memory or Gloo's affair."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, ReduceOp, Store, Work

from shoal.comm.backend import collectives, hosts
from shoal.comm.backend.call import DTYPES, MOST_RANKS, Call
from shoal.comm.backend.collectives import Steps
from shoal.comm.backend.exchange import Exchange
from shoal.comm.backend.hosts import BetweenHosts
from shoal.comm.backend.meeting import Meeting, meet
from shoal.comm.backend.order import Order
from shoal.comm.backend.peers import Peers
from shoal.comm.backend.reduction import can_reduce
from shoal.comm.backend.waiting import SPIN_S, Waiting
from shoal.comm.backend.watched import watch_steps, watch_work
from shoal.trace.recorder import Flight, Recorder

logger = logging.getLogger("shoal.comm")
GLOO = dist.ProcessGroup.BackendType.GLOO
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
Base: Any = dist.ProcessGroup  # its stubs know each call in several forms, of which torch.distributed uses one
Options: Any = c10d  # and leave out the options


class ShoalGroup(Base):
    """A group of ranks that meet in shared memory, with Gloo beside it. What is not done here, the base class hands on.

    Args:
        store: of this group alone.
        ranks: the global ranks of the group, for messages; empty for all there are.
        timeout: for each meeting in a call.
        label: what all its ranks call the group, in traces.
        meets: ranks use shared memory; without it Gloo does all.

    Attributes:
        recorder: is told of every call while a trace is taken.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        label: str = "",
        meets: bool = True,
    ) -> None:
        super().__init__(rank, size)
        self.recorder: Recorder | None = None
        self._label = label
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout)
        self._register_backend(torch.device("cpu"), GLOO, gloo)
        self._set_default_backend(GLOO)
        self._ranks = list(ranks) or list(range(size))
        self._known: dict[tuple[Any, ...], tuple[Call, int]] = {}
        self._order: Order | None = None
        self._peers: Peers | None = None
        self._between: BetweenHosts | None = None
        if meets:
            self._settle(store, meet(PrefixStore("meeting", store), rank, size), timeout)

    def _settle(self, store: Store, meeting: Meeting, timeout: timedelta) -> None:
        here = next(ranks for ranks in meeting.hosts if self.rank() in ranks)
        if reason := _why_not(meeting, self.size()):
            logger.log(logging.WARNING if meeting.reason else logging.DEBUG, "%s: Gloo does all: %s", self, reason)
            return
        assert meeting.memory is not None
        reached = {here.index(rank): memory for rank, memory in meeting.reached.items()}
        self._exchange = Exchange(
            here.index(self.rank()), meeting.memory, reached, [self._ranks[rank] for rank in here]
        )
        if len(meeting.hosts) > 1:
            self._between = BetweenHosts(store, meeting.hosts, self.rank(), timeout)
        self._peers = Peers({here.index(rank): pid for rank, pid in meeting.pids.items()})
        spin_s = SPIN_S if len(here) <= len(os.sched_getaffinity(0)) else 0.0
        self._order = Order(Waiting(self._exchange, self._peers, timeout.total_seconds(), spin_s), f"{self._ranks}")

    def __repr__(self) -> str:
        return f"group of ranks {self._ranks}"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "shoal"

    @property
    def sums_in_order(self) -> bool:
        """Whether numbers are added in one order wherever in a tensor they lie: that of ranks, then that of hosts."""
        return self._order is not None

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks meet in shared memory."""
        return self._order is not None and self._between is None

    # --- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or Options.AllreduceOptions()
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if not self._does(tensors[0], operation, over_hosts=True) or len(tensors) > 1:
            return self._leave("allreduce", tensors, tensors, opts)
        flat = _flat(tensors[0])
        call = self._call("all_reduce", flat, operation)
        return self._run(call, lambda: self._all_reduce(flat, operation), tensors, (flat,), tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or Options.AllreduceCoalescedOptions()
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if not all(self._does(tensor, operation, over_hosts=True) for tensor in tensors):
            return self._leave("allreduce_coalesced", tensors, tensors, opts)
        flats = [_flat(tensor) for tensor in tensors]
        return self._run_each(
            "all_reduce",
            [(flat, partial(self._all_reduce, flat, operation)) for flat in flats],
            tensors,
            flats,
            tensors,
            opts,
            operation,
        )

    def _all_reduce(self, flat: Tensor, operation: str) -> Steps:
        if self._between is None:
            return collectives.all_reduce(self._exchange, flat, operation)
        return hosts.all_reduce(self._exchange, self._between, flat, operation)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        operation, root = OPERATIONS.get(opts.reduceOp.op.value, ""), opts.rootRank
        if not self._does(tensors[0], operation):
            return self._leave("reduce", tensors, tensors, opts)
        flat = _flat(tensors[0])
        return self._run(
            self._call("reduce", flat, operation, root),
            lambda: collectives.reduce(self._exchange, flat, operation, root),
            tensors,
            (flat,),
            tensors,
            opts,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or Options.ReduceScatterOptions()
        return self._reduce_scatter(outputs, [inputs[0]], opts, "reduce_scatter", [(outputs, inputs, opts)])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        opts = opts or Options.ReduceScatterOptions()
        return self._reduce_scatter(
            [output], [_rows(tensor, self.size())], opts, "_reduce_scatter_base", [(output, tensor, opts)]
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or Options.ReduceScatterOptions()
        rows = [_rows(tensor, self.size()) for tensor in inputs]
        return self._reduce_scatter(
            outputs, rows, opts, "_reduce_scatter_base", [(o, i, opts) for o, i in _pairs(outputs, inputs)]
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self, outputs: list[Tensor], rows: list[Sequence[Tensor]], opts: Any, other: str, others: list[tuple[Any, ...]]
    ) -> Work:
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if not all(self._does(output, operation) and self._even(output, r) for output, r in _pairs(outputs, rows)):
            return self._leave_each(other, outputs, others)
        flats, flat_rows = [_flat(output) for output in outputs], [[_flat(row) for row in each] for each in rows]
        return self._run_each(
            "reduce_scatter",
            [
                (flat, partial(collectives.reduce_scatter, self._exchange, flat, r, operation))
                for flat, r in _pairs(flats, flat_rows)
            ],
            outputs,
            flats,
            outputs,
            opts,
            operation,
        )

    # --- copies

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        if not self._does(tensors[0]) or len(tensors) > 1:
            return self._leave("broadcast", tensors, tensors, opts)
        flat, root = _flat(tensors[0]), opts.rootRank
        return self._run(
            self._call("broadcast", flat, root=root),
            lambda: collectives.broadcast(self._exchange, flat, root),
            tensors,
            (flat,),
            tensors,
            opts,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or Options.AllgatherOptions()
        return self._all_gather([outputs[0]], inputs, outputs[0], opts, "allgather", [(outputs, inputs, opts)])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        opts = opts or Options.AllgatherOptions()
        rows = _rows(output, self.size())
        return self._all_gather([rows], [tensor], [output], opts, "_allgather_base", [(output, tensor, opts)])

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or Options.AllgatherOptions()
        rows = [_rows(output, self.size()) for output in outputs]
        return self._all_gather(
            rows, inputs, outputs, opts, "_allgather_base", [(o, i, opts) for o, i in _pairs(outputs, inputs)]
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(
        self,
        rows: list[Sequence[Tensor]],
        inputs: list[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        other: str,
        others: list[tuple[Any, ...]],
    ) -> Work:
        if not all(self._does(tensor) and self._even(tensor, r) for tensor, r in _pairs(inputs, rows)):
            return self._leave_each(other, inputs, others)
        flats, flat_rows = [_flat(tensor) for tensor in inputs], [[_flat(row) for row in each] for each in rows]
        return self._run_each(
            "all_gather",
            [(flat, partial(collectives.all_gather, self._exchange, flat, r)) for flat, r in _pairs(flats, flat_rows)],
            [row for r in rows for row in r],
            [row for r in flat_rows for row in r],
            results,
            opts,
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        root, is_root = opts.rootRank, opts.rootRank == self.rank()
        rows = list(outputs[0]) if is_root else []
        if not self._does(inputs[0]) or (is_root and not self._even(inputs[0], rows)):
            return self._leave("gather", inputs, outputs, inputs, opts)
        flat, flat_rows = _flat(inputs[0]), [_flat(row) for row in rows]
        return self._run(
            self._call("gather", flat, root=root),
            lambda: collectives.all_gather(self._exchange, flat, flat_rows if is_root else None, root),
            rows,
            flat_rows,
            rows,
            opts,
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        root, is_root = opts.rootRank, opts.rootRank == self.rank()
        rows = [_flat(row) for row in inputs[0]] if is_root else None
        if not self._does(outputs[0]) or (rows is not None and not self._even(outputs[0], rows)):
            return self._leave("scatter", outputs, outputs, inputs, opts)
        flat = _flat(outputs[0])
        return self._run(
            self._call("scatter", flat, root=root),
            lambda: collectives.scatter(self._exchange, flat, rows, root),
            outputs,
            (flat,),
            outputs,
            opts,
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or Options.AllToAllOptions()
        return self._all_to_all(outputs, inputs, outputs, opts, "alltoall", [(outputs, inputs, opts)])

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Work:
        opts = opts or Options.AllToAllOptions()
        args = (output, tensor, out_sizes, sizes, opts)
        rows, out_rows = _split(tensor, sizes, self.size()), _split(output, out_sizes, self.size())
        return self._all_to_all(out_rows, rows, [output], opts, "alltoall_base", [args])

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        other: str,
        others: list[tuple[Any, ...]],
    ) -> Work:
        if not all(self._does(tensor) for tensor in inputs):
            return self._leave_each(other, inputs, others)
        flats, rows = [_flat(output) for output in outputs], [_flat(tensor) for tensor in inputs]
        return self._run(
            self._call("all_to_all", rows[0][:0]),
            lambda: collectives.all_to_all(self._exchange, flats, rows),
            outputs,
            flats,
            results,
            opts,
            sum(row.nbytes for row in rows),
        )

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        return self._leave("send", tensors, tensors, receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        return self._leave("recv", tensors, tensors, sender, tag)

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or Options.BarrierOptions()
        if not self.on_one_host:
            return self._leave("barrier", (), opts)
        call = self._known.setdefault((), (Call("barrier"), Call("barrier").word))
        return self._run(call, lambda: collectives.barrier(self._exchange), (), (), (), opts)

    def shutdown(self) -> None:
        """Finish what was begun, and leave."""
        if self._order is not None:
            self._order.close()
        if self._peers is not None:
            self._peers.close()
        super().shutdown()

    # --- how a call is made

    def _does(self, tensor: Tensor, operation: str | None = None, over_hosts: bool = False) -> bool:
        return (
            self._order is not None
            and (over_hosts or self._between is None)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and (tensor.dtype in DTYPES if operation is None else can_reduce(tensor.dtype, operation))
        )

    def _even(self, tensor: Tensor, rows: Sequence[Tensor]) -> bool:
        """Whether there is a row as long as `tensor` for each rank; what is wrong otherwise, Gloo says."""
        length, dtype = tensor.numel(), tensor.dtype
        return len(rows) == self.size() and all(row.numel() == length and row.dtype == dtype for row in rows)

    def _call(self, kind: str, tensor: Tensor, operation: str = "", root: int = 0) -> tuple[Call, int]:
        key = (kind, tensor.dtype, tensor.numel(), operation, root)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 4096:
                self._known.clear()
            call = Call(kind, tensor.dtype, tensor.numel(), operation, root)
            found = self._known[key] = call, call.word
        return found

    def _run(
        self,
        call: tuple[Call, int],
        start: Callable[[], Steps],
        outputs: Sequence[Tensor],
        flats: Sequence[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        size_bytes: int = 0,
    ) -> Work:
        assert self._order is not None
        begin, order, at_once = start, self._order, not opts.asyncOp
        for output in outputs:
            if not output.is_contiguous():
                begin = partial(_back, flats, outputs, start)
                break
        if self.recorder is None:
            return order.call(*call, begin, results, at_once)
        kind, root = call[0].kind, call[0].root
        size_bytes = size_bytes or call[0].length * call[0].dtype.itemsize
        flight = self.recorder.depart(kind, size_bytes, self._label, self._awaited(kind, root))
        return watch_steps(self.recorder, flight, begin, lambda steps: order.call(*call, steps, results, at_once))

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
        first = calls[0][0] if calls else (Call("barrier"), Call("barrier").word)
        size_bytes = sum(call.length * call.dtype.itemsize for (call, _), _ in calls)
        steps = partial(_one_after_the_other, self._exchange, calls)
        return self._run(first, steps, outputs, flats, results, opts, size_bytes)

    def _leave(self, name: str, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Somebody else's affair: Gloo's."""
        if self._order is not None:
            logger.debug("%s: Gloo does %s of %s", self, name, tensors[0].dtype if tensors else "nothing")
        # Asked for by name: the base class would ask this one again.
        backend = self._get_backend(tensors[0].device if tensors else torch.device("cpu"))
        call: Callable[[], Work] = partial(getattr(backend, name), *args)
        if self.recorder is None:
            return call()
        flight = self._departs(self.recorder, name, sum(tensor.nbytes for tensor in tensors), args)
        return watch_work(self.recorder, flight, call, tells=name not in ("send", "recv"))

    # --- while a trace is taken

    def _departs(self, recorder: Recorder, name: str, size_bytes: int, args: tuple[Any, ...]) -> Flight:
        """A call of Gloo's begins."""
        if name not in ("send", "recv"):
            root = int(getattr(args[-1], "rootRank", 0))
            return recorder.depart(f"{name} (Gloo)", size_bytes, self._label, self._awaited(name, root))
        here, there = self._ranks[self.rank()], self._ranks[args[1]]
        ends = (here, there) if name == "send" else (there, here)
        meeting = f"{self._label}: {ends[0]} > {ends[1]}, tag {args[2]}"
        word = "to" if name == "send" else "from"
        return recorder.depart(f"{name} {word} {there}", size_bytes, meeting, () if name == "send" else (there,))

    def _awaited(self, kind: str, root: int) -> tuple[int, ...]:
        """Whom a rank has to wait for in such a call."""
        others = tuple(rank for rank in self._ranks if rank != self._ranks[self.rank()])
        if kind in ("broadcast", "scatter"):
            return () if root == self.rank() else (self._ranks[root],)
        if kind in ("reduce", "gather"):
            return others if root == self.rank() else ()
        return others

    def _leave_each(self, name: str, tensors: Sequence[Tensor], calls: list[tuple[Any, ...]]) -> Work:
        *before, last = calls
        for args in before:
            self._leave(name, tensors, *args).wait()
        return self._leave(name, tensors, *last)


def _why_not(meeting: Meeting, size: int) -> str:
    """Why Gloo does everything; empty where it need not."""
    if meeting.reason:
        return meeting.reason
    if size == 1 or size > MOST_RANKS:
        return f"{size} ranks"
    if len({len(ranks) for ranks in meeting.hosts}) > 1 or len(meeting.hosts) == size:
        return f"{', '.join(str(len(ranks)) for ranks in meeting.hosts)} ranks on {len(meeting.hosts)} hosts"
    return ""


def _flat(tensor: Tensor) -> Tensor:
    """The numbers of `tensor` in a row: its own where they lie so, else a copy. Autograd sees nothing of it."""
    data = tensor.data
    return data if data.dim() == 1 and data.is_contiguous() else data.reshape(-1)


def _rows(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """A flat buffer as a row for each rank; none where it cannot be cut so."""
    if tensor.numel() % size or not tensor.is_contiguous():
        return ()
    return tensor.data.view(size, tensor.numel() // size).unbind()


def _split(tensor: Tensor, sizes: Sequence[int], size: int) -> Sequence[Tensor]:
    """What of dimension 0 belongs to each rank."""
    rows: Sequence[Tensor] = tensor.data.split(list(sizes) or [len(tensor) // size] * size)
    return rows


def _pairs(first: Sequence[Any], second: Sequence[Any]) -> zip[tuple[Any, Any]]:
    return zip(first, second, strict=True)


def _back(flats: Sequence[Tensor], tensors: Sequence[Tensor], start: Callable[[], Steps]) -> Steps:
    """The steps, and then the numbers of copies back to where they belong."""
    yield from start()
    for flat, tensor in _pairs(flats, tensors):
        if not tensor.is_contiguous():
            tensor.data.copy_(flat.view(tensor.shape))


def _one_after_the_other(exchange: Exchange, calls: Sequence[tuple[tuple[Call, int], Callable[[], Steps]]]) -> Steps:
    for call, start in calls:
        exchange.begin(*call)
        yield from start()
