"""Calls that Gloo makes: messages, and the collectives that are not in shared memory.

      recv, gather ──> Gloo ──> GlooWork ── wait() ──┬── complete
                                                     └── Gloo's error ──> PeerLost, CollectiveFailed

Gloo's errors name a connection; ours name the other rank and its state. The launcher sees each call
in a progress word: without it, a rank that waits could not be told from one that does not come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.errors import CollectiveFailed, PeerLost
from shoal.platform.torch_private.c10d import backend_for
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.call_handles import CompletedWork, ForwardedWork
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.tensor_utils import is_flat_contiguous
from shoal.shm_backend.torch_calls import torch_call, trace
from shoal.trace.recorder import InFlight, Recorder
from shoal.watchdog.progress_word import COLLECTIVES, RECV, SEND
from shoal.watchdog.progress_writer import CallProgress, now_ns, own_progress

logger = logging.getLogger("shoal.comm")
NO_LIMIT = timedelta(0)
EXIT_S = 0.5  # the longest time between the end of a process's connections and its own end
KINDS = {kind.replace("_", ""): kind for kind in COLLECTIVES}
# In these, Gloo goes through the memory of a tensor and not through its elements.
IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
# torch's stubs know each collective in several forms, of which torch.distributed uses one.
Base: Any = dist.ProcessGroup


def _gloo_method(name: str) -> Any:
    def method(self: GlooCalls, *args: Any) -> Work:
        return self._by_gloo(name, *args)

    method.__name__ = name
    return torch_call(f"{name}_")(method)


class GlooCalls(Base):
    """send, recv, and the collectives that are Gloo's on every host. `ShoalGroup` sets the
    attributes.

    The base class hands the remaining methods of torch to Gloo without a progress word. Where C++
    waits for such a call, it may hold the interpreter's lock, which Gloo's thread may need: every
    collective that functional collectives call has a method here.

    Attributes:
        recorder: records every call while a trace is taken, else None.
    """

    recorder: Recorder | None
    _label: str
    _ranks: list[int]
    _peers: PeerLiveness | None
    _host_ranks: Sequence[int]  # ranks of the group on this host
    _timeout_s: Callable[[], float]
    _gloo_progress: CallProgress | None
    _num_gloo_calls: int

    allreduce_coalesced = _gloo_method("allreduce_coalesced")
    reduce = _gloo_method("reduce")
    gather = _gloo_method("gather")
    scatter = _gloo_method("scatter")
    alltoall = _gloo_method("alltoall")
    alltoall_base = all_to_all_single = _gloo_method("alltoall_base")

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        return self._message("send", tensors[0], receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        return self._message("recv", tensors[0], sender, tag)

    def _message(self, kind: str, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start one end of a message, and record it while a trace is taken."""
        if not tensor.numel():
            return CompletedWork((tensor,))  # Gloo cannot receive a message without bytes
        here, there = self._ranks[self.rank()], self._ranks[peer]
        word = "to" if kind == "send" else "from"
        count = f"{tensor.numel():,} x {str(tensor.dtype).removeprefix('torch.')}"
        doing = f"{kind}({count} {word} rank {there}, tag {tag})"
        number = SEND if kind == "send" else RECV
        waiting = partial(own_progress().message_wait, number, there, tensor.numel())
        post = getattr(backend_for(self, tensor.device), kind)
        start = partial(self._start, partial(post, [tensor], peer, tag), doing, [peer], waiting)
        if self.recorder is None:
            return start()
        ends = (here, there) if kind == "send" else (there, here)
        # Both ends record the same text, by which the trace matches a send with its recv.
        match = f"{self._label}: {ends[0]} > {ends[1]}, tag {tag}"
        waited_for = () if kind == "send" else (there,)
        flight = self.recorder.start(f"{kind} {word} {there}", tensor.nbytes, match, waited_for)
        return trace(self.recorder, flight, start)

    def _by_gloo(self, name: str, *args: Any) -> Work:
        """Make a collective of Gloo, or of the backend of another device.

        Args:
            name: the method of torch's backend.
            args: its arguments: tensors in lists, and torch's options.
        """
        groups = [found for value in args if (found := list(_tensors_in(value)))]
        device = groups[0][0].device if groups else torch.device("cpu")
        call: Callable[[], Work] = partial(getattr(backend_for(self, device), name), *args)
        if device.type == "cpu":
            logger.debug("%s: Gloo does %s", self, name)
            if name not in IN_PLACE:
                _check_contiguous(name, groups)
            kind = KINDS.get(name.replace("_", "").removesuffix("base"), "gloo")
            length = min((sum(map(torch.numel, group)) for group in groups), default=0)
            self._show(CallSignature(kind, torch.uint8, length))
            others = [rank for rank in range(self.size()) if rank != self.rank()]
            call = partial(self._start, call, f"{kind} by Gloo", others, own_progress().waiting)
        if self.recorder is None:
            return call()
        return self._traced(self.recorder, name, groups, args[-1], call)

    def _start(
        self,
        call: Callable[[], Work],
        doing: str,
        peers: Sequence[int],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> Work:
        """Start a call of Gloo, whose errors name the ranks `peers` of the group."""
        try:
            work = call()
        except RuntimeError as error:
            raise self._explain(error, doing, peers, 0.0) from None
        return GlooWork(
            work, lambda error, limit_s: self._explain(error, doing, peers, limit_s), waiting
        )

    def _show(self, call: CallSignature) -> None:
        """Say to the launcher that this rank begins a call."""
        if self._gloo_progress is None:  # most groups make no such call
            label = f"{self._label} by Gloo on {self._ranks}"
            self._gloo_progress = own_progress().join_group(label, self._ranks)
        self._num_gloo_calls += 1
        self._gloo_progress.begin(self._num_gloo_calls, call.encoded)

    def _traced(
        self,
        recorder: Recorder,
        name: str,
        groups: Sequence[Sequence[Tensor]],
        opts: Any,
        call: Callable[[], Work],
    ) -> Work:
        """Make a call while a trace is taken."""
        size_bytes = min((sum(t.nbytes for t in group) for group in groups), default=0)
        root = int(getattr(opts, "rootRank", 0))
        peers, is_root = self._peer_ranks(), root == self.rank()
        if name in ("broadcast", "scatter"):
            peers = () if is_root else (self._ranks[root],)
        elif name in ("reduce", "gather") and not is_root:
            peers = ()
        flight: InFlight = recorder.start(f"{name} (Gloo)", size_bytes, self._label, peers)
        work = trace(recorder, flight, call)
        work.get_future().add_done_callback(lambda _: flight.finish())
        return work

    def _peer_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of all other ranks of the group."""
        return tuple(rank for rank in self._ranks if rank != self._ranks[self.rank()])

    # --- errors

    def _explain(
        self, error: RuntimeError, doing: str, peers: Sequence[int], limit_s: float
    ) -> RuntimeError:
        """Return an error that names other ranks, for an error of Gloo.

        An error that is not about a connection is returned unchanged.

        Args:
            peers: the ranks of the group that this rank waited for.
            limit_s: the time that it waited; 0 for the group's timeout.
        """
        # Gloo has one error class for all, so its texts are the only distinction.
        text, rank = str(error), self._ranks[self.rank()]
        if "Timed out" in text:
            names = ", ".join(self._with_state(peer) for peer in peers)
            return CollectiveFailed(
                f"rank {rank} waited {limit_s or self._timeout_s():g} s in {doing} for {names}. "
                "All ranks must make the same calls, and every send needs its recv, with the same "
                "tag; a rank that computes for longer needs a longer timeout in "
                "init_process_group."
            )
        if "pair closure" in text:
            return CollectiveFailed(
                f"{doing}: nothing passes between these ranks any more, since a call was not "
                "complete within the timeout."
            )
        if "onnection" in text or "Broken pipe" in text:
            return PeerLost(f"{self._lost(peers)} while rank {rank} waited for it in {doing}.")
        return error

    def _with_state(self, peer: int) -> str:
        """Return the name of a rank, with the state of its process if that is on this host."""
        name = f"rank {self._ranks[peer]}"
        if self._peers is None or peer not in self._host_ranks:
            return name
        index = self._host_ranks.index(peer)
        return f"{name} (process {self._peers.pids[index]}), which {self._peers.state(index)}"

    def _lost(self, peers: Sequence[int]) -> str:
        """Return which of these ranks has ended, as the beginning of a sentence."""
        if self._peers is not None:
            here = [self._host_ranks.index(peer) for peer in peers if peer in self._host_ranks]
            if (index := self._peers.first_ended(here, EXIT_S)) is not None:
                rank = self._ranks[self._host_ranks[index]]
                return f"rank {rank} (process {self._peers.pids[index]}) has ended"
        names = " or ".join(f"rank {self._ranks[peer]}" for peer in peers)
        return f"{names} has ended, or has left the group,"


class GlooWork(ForwardedWork):
    """A handle of Gloo whose errors name other ranks.

    Args:
        explain: makes the error to raise of Gloo's error and the limit of the wait in seconds.
        waiting: a context in which the launcher sees that this rank waits.
    """

    def __init__(
        self,
        work: Work,
        explain: Callable[[RuntimeError, float], RuntimeError],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(work)
        self._explain, self._waiting = explain, waiting

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the call is complete.

        Raises: CollectiveFailed: it was not complete in time. PeerLost: another rank has ended or
            left the group.
        """
        try:
            with counted_wait(self._waiting()):
                return bool(self._work.wait(timeout))
        except RuntimeError as error:
            raise self._explain(error, timeout.total_seconds()) from None


@contextmanager
def counted_wait(waiting: AbstractContextManager[None]) -> Iterator[None]:
    """Enter `waiting`, a context of the progress writer, and count the time in it."""
    start_ns = now_ns()
    try:
        with waiting:
            yield
    finally:
        own_progress().add_waited(now_ns() - start_ns)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument: a tensor, or a list of tensors, or of such lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def _check_contiguous(name: str, groups: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError for a tensor whose elements Gloo would read or write in another order."""
    for tensor in (tensor for group in groups for tensor in group):
        if tensor.layout is torch.strided and not is_flat_contiguous(tensor.data):
            raise ValueError(
                f"{name} by Gloo takes contiguous tensors, not one of shape {tuple(tensor.shape)} "
                f"and strides {tensor.stride()}. Pass tensor.resolve_conj().contiguous(), and copy "
                "the result back."
            )
