"""Calls that Gloo makes for a `ShoalGroup`: messages, and what shared memory does not carry.

Gloo's errors name a connection; ours name the other rank and its state. The launcher sees each call
in a progress word: without it, a rank that waits could not be told from one that does not come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.errors import CollectiveFailed, PeerLost, UsageError
from shoal.platform.torch_private.c10d import timeout_of
from shoal.platform.torch_private.tensor_state import is_zerotensor
from shoal.shm_backend.call_queue import NO_LIMIT, CompletedWork, ForwardedWork, traced
from shoal.shm_backend.phase_board import CallSignature
from shoal.shm_backend.waiter import PeerLiveness
from shoal.trace.recorder import InFlight, Recorder
from shoal.watchdog.progress_word import COLLECTIVES, RECV, SEND
from shoal.watchdog.progress_writer import CallProgress, now_ns, own_progress

logger = logging.getLogger("shoal.comm")
EXIT_S = 0.5  # the longest time between the end of a process's connections and its own end
KINDS = {kind.replace("_", ""): kind for kind in COLLECTIVES}
# In these, Gloo goes through the memory of a tensor and not through its elements.
IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")


class GlooCalls:
    """The calls of one group that Gloo makes.

    Args:
        gloo: torch's backend.
        label: name of the group in traces, the same on all its ranks.
        ranks: the global ranks of the group.
        rank: this rank in the group.

    Attributes:
        peers: the processes of the ranks on this host, by rank in the group; None if unknown.
    """

    def __init__(self, gloo: Any, label: str, ranks: Sequence[int], rank: int) -> None:
        self._gloo, self._label, self._ranks, self._rank = gloo, label, ranks, rank
        self.peers: PeerLiveness | None = None
        self._progress: CallProgress | None = None
        self._num_calls = 0

    def peer_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of all other ranks of the group."""
        return tuple(rank for rank in self._ranks if rank != self._ranks[self._rank])

    def message(
        self, kind: str, tensor: Tensor, peer: int, tag: int, recorder: Recorder | None
    ) -> Work:
        """Start one end of a message ("send" or "recv"), and record it while a trace is taken."""
        _check_device([tensor])
        if not tensor.numel():
            return CompletedWork((tensor,))  # Gloo cannot receive a message without bytes
        here, there = self._ranks[self._rank], self._ranks[peer]
        word = "to" if kind == "send" else "from"
        count = f"{tensor.numel():,} x {str(tensor.dtype).removeprefix('torch.')}"
        doing = f"{kind}({count} {word} rank {there}, tag {tag})"
        number = SEND if kind == "send" else RECV
        waiting = partial(own_progress().message_wait, number, there, tensor.numel())
        post = partial(getattr(self._gloo, kind), [tensor], peer, tag)
        start = partial(self._start, post, doing, [peer], waiting)
        if recorder is None:
            return start()
        ends = (here, there) if kind == "send" else (there, here)
        # Both ends record the same text, by which the trace matches a send with its recv.
        match = f"{self._label}: {ends[0]} > {ends[1]}, tag {tag}"
        waited_for = () if kind == "send" else (there,)
        flight = recorder.start(f"{kind} {word} {there}", tensor.nbytes, match, waited_for)
        return traced(recorder, flight, start)

    def collective(self, name: str, args: Sequence[Any], recorder: Recorder | None) -> Work:
        """Make a collective.

        Args:
            name: the method of torch's backend.
            args: its arguments: tensors in lists, and torch's options.
        """
        groups = [tensors for value in args if (tensors := list(_tensors_in(value)))]
        for tensors in groups:
            _check_device(tensors)
        logger.debug("group of ranks %s: Gloo does %s", self._ranks, name)
        _check_layout(name, groups)
        kind = KINDS.get(name.replace("_", "").removesuffix("base"), "gloo")
        length = min((sum(map(torch.numel, tensors)) for tensors in groups), default=0)
        if self._progress is None:  # most groups make no such call
            label = f"{self._label} by Gloo on {self._ranks}"
            self._progress = own_progress().join_group(label, self._ranks)
        self._num_calls += 1
        self._progress.begin(self._num_calls, CallSignature(kind, torch.uint8, length).encoded)
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        post = partial(getattr(self._gloo, name), *args)
        start = partial(self._start, post, f"{kind} by Gloo", others, own_progress().waiting)
        if recorder is None:
            return start()
        return self._traced(recorder, name, groups, args[-1], start)

    def _start(
        self,
        post: Callable[[], Work],
        doing: str,
        peers: Sequence[int],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> Work:
        """Start a call of Gloo, whose errors name the ranks `peers` of the group."""
        try:
            work = post()
        except RuntimeError as error:
            raise self._explain(error, doing, peers, 0.0) from None
        return GlooWork(
            work, lambda error, limit_s: self._explain(error, doing, peers, limit_s), waiting
        )

    def _traced(
        self,
        recorder: Recorder,
        name: str,
        groups: Sequence[Sequence[Tensor]],
        opts: Any,
        start: Callable[[], Work],
    ) -> Work:
        """Make a collective while a trace is taken."""
        size_bytes = min((sum(t.nbytes for t in tensors) for tensors in groups), default=0)
        root = int(getattr(opts, "rootRank", 0))
        peers, is_root = self.peer_ranks(), root == self._rank
        if name in ("broadcast", "scatter"):
            peers = () if is_root else (self._ranks[root],)
        elif name in ("reduce", "gather") and not is_root:
            peers = ()
        flight: InFlight = recorder.start(f"{name} (Gloo)", size_bytes, self._label, peers)
        work = traced(recorder, flight, start)
        work.get_future().add_done_callback(lambda _: flight.finish())
        return work

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
        text, rank = str(error), self._ranks[self._rank]
        if "Timed out" in text:
            names = ", ".join(self._with_state(peer) for peer in peers)
            limit_s = limit_s or timeout_of(self._gloo).total_seconds()
            return CollectiveFailed(
                f"rank {rank} waited {limit_s:g} s in {doing} for {names}. "
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
        if self.peers is None or peer not in self.peers.pids:
            return name
        return f"{name} (process {self.peers.pids[peer]}), which {self.peers.state(peer)}"

    def _lost(self, peers: Sequence[int]) -> str:
        """Return which of these ranks has ended, as the beginning of a sentence."""
        if self.peers is not None:
            here = [peer for peer in peers if peer in self.peers.pids]
            if (peer := self.peers.first_ended(here, EXIT_S)) is not None:
                return f"rank {self._ranks[peer]} (process {self.peers.pids[peer]}) has ended"
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
        start_ns = now_ns()
        try:
            with self._waiting():
                return bool(self._work.wait(timeout))
        except RuntimeError as error:
            raise self._explain(error, timeout.total_seconds()) from None
        finally:
            own_progress().add_waited(now_ns() - start_ns)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument: a tensor, or a list of tensors, or of such lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def _check_device(tensors: Sequence[Tensor]) -> None:
    """Raise UsageError for a tensor that is not in the memory of a process."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise UsageError(
                f"a group of backend 'shoal' takes CPU tensors alone, not one on {tensor.device}. "
                "Make the group with backend 'cpu:gloo,cuda:nccl', or another one for this device."
            )


def is_flat_contiguous(tensor: Tensor) -> bool:
    """Return True if the memory of `tensor` holds exactly its elements, one after the other.

    A contiguous tensor may still differ from its memory: torch delays negation and conjugation,
    and its zero tensors have no memory at all."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or is_zerotensor(tensor))
    )


def _has_no_gaps(tensor: Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _check_layout(name: str, groups: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError for a tensor whose elements Gloo would not read or write, or in another
    order.
    """
    fits = _has_no_gaps if name in IN_PLACE else is_flat_contiguous
    for tensor in (tensor for group in groups for tensor in group):
        if tensor.layout is torch.strided and not fits(tensor.data):
            raise ValueError(
                f"{name} by Gloo takes contiguous tensors, not one of shape {tuple(tensor.shape)} "
                f"and strides {tensor.stride()}. Pass tensor.resolve_conj().contiguous(), and copy "
                "the result back."
            )
