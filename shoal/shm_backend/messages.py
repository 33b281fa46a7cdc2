"""Messages from one rank to another, with the methods that torch.distributed calls.

      recv ──> Gloo ──> MessageWork ── wait() ──┬── the message
                                                └── Gloo's error ──> PeerLost, CollectiveFailed

Gloo carries the messages. Its errors name a connection; ours name the other rank and its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.errors import CollectiveFailed, PeerLost
from shoal.platform.torch_private.c10d import backend_for, source_rank
from shoal.shm_backend.call_handles import CompletedWork
from shoal.shm_backend.dispatch import CollectiveDispatch
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.traced_work import trace_work
from shoal.watchdog.progress_word import RECV, SEND
from shoal.watchdog.progress_writer import now_ns, own_progress

NO_LIMIT = timedelta(0)
EXIT_S = 0.5  # the longest time between the end of a process's connections and its own end


class MessageSignature(NamedTuple):
    """One end of a message.

    Args:
        kind: "send" or "recv".
        peer: the other rank in the group; None for a recv from any rank.
    """

    kind: str
    tensor: Tensor
    peer: int | None
    tag: int


class Messages(CollectiveDispatch):
    """send, recv, and recv from any rank."""

    _peers: PeerLiveness | None
    _host_ranks: Sequence[int]  # ranks of the group on this host
    _timeout_s: Callable[[], float]

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        return self._post(MessageSignature("send", tensors[0], receiver, tag))

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        return self._post(MessageSignature("recv", tensors[0], sender, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._post(MessageSignature("recv", tensors[0], None, tag))

    def _post(self, message: MessageSignature) -> Work:
        """Start one end of a message, and record it while a trace is taken."""
        tensor = message.tensor
        if not tensor.numel() and message.peer is not None:
            return CompletedWork((tensor,))  # Gloo cannot receive a message without bytes
        if self.recorder is None:
            return self._start(message)
        args = (tensor, message.peer, message.tag)
        flight = self._trace_start(self.recorder, message.kind, tensor.nbytes, args)
        return trace_work(self.recorder, flight, lambda: self._start(message), has_future=False)

    def _start(self, message: MessageSignature) -> Work:
        backend = backend_for(self, message.tensor.device)
        kind, tensor, peer, tag = message
        try:
            if peer is None:
                work = backend.recv_anysource([tensor], tag)
            elif kind == "recv":
                work = backend.recv([tensor], peer, tag)
            else:
                work = backend.send([tensor], peer, tag)
        except RuntimeError as error:
            raise self._explain(error, message, 0.0) from None

        def explain(error: RuntimeError, limit_s: float) -> RuntimeError:
            return self._explain(error, message, limit_s)

        there = -1 if peer is None else self._ranks[peer]
        described = SEND if kind == "send" else RECV, there, tensor.numel()
        return MessageWork(work, tensor, explain, described)

    def _explain(
        self, error: RuntimeError, message: MessageSignature, limit_s: float
    ) -> RuntimeError:
        """Return an error that names the other rank, for an error of Gloo.

        An error that is not about the connection is returned unchanged.

        Args: limit_s: the time that this rank waited; 0 for the group's timeout.
        """
        # Gloo has one error class for all, so its texts are the only distinction.
        text = str(error)
        if "Timed out" in text:
            return CollectiveFailed(self._timeout_text(message, limit_s or self._timeout_s()))
        if "pair closure" in text:
            return CollectiveFailed(
                f"{self._describe(message)}: no messages pass between these ranks any more, "
                "since one was not complete within the timeout."
            )
        if "onnection" in text or "Broken pipe" in text:
            return PeerLost(self._lost_text(message))
        return error

    def _timeout_text(self, message: MessageSignature, limit_s: float) -> str:
        """Return the error text for a time-out, with the state of the peer if it is known."""
        self_rank, described = self._ranks[self.rank()], self._describe(message)
        waited = f"rank {self_rank} waited {limit_s:g} s in {described}"
        if message.peer is None:
            return f"{waited}."
        state = ""
        if self._peers is not None and message.peer in self._host_ranks:
            index = self._host_ranks.index(message.peer)
            state = f" (process {self._peers.pids[index]}), which {self._peers.state(index)}"
        return (
            f"{waited} for rank {self._ranks[message.peer]}{state}. Every send needs its recv, "
            "with the same tag; a rank that computes for longer needs a longer timeout in "
            "init_process_group."
        )

    def _lost_text(self, message: MessageSignature) -> str:
        """Return the error text for a broken connection."""
        self_rank, described = self._ranks[self.rank()], self._describe(message)
        if message.peer is None:
            return f"rank {self_rank} waits in {described}, but another rank has ended or has left."
        name = f"rank {self._ranks[message.peer]}"
        doing = f"while rank {self_rank} waited for it in {described}."
        if self._peers is not None and message.peer in self._host_ranks:
            index = self._host_ranks.index(message.peer)
            if self._peers.has_ended(index, EXIT_S):
                return f"{name} (process {self._peers.pids[index]}) has ended {doing}"
        return f"{name} has ended, or has left the group, {doing}"

    def _describe(self, message: MessageSignature) -> str:
        """Describe a message for errors, such as `send(1,000 x float32 to rank 1, tag 0)`."""
        peer = "any rank" if message.peer is None else f"rank {self._ranks[message.peer]}"
        direction = "to" if message.kind == "send" else "from"
        dtype = str(message.tensor.dtype).removeprefix("torch.")
        count = f"{message.tensor.numel():,} x {dtype}"
        return f"{message.kind}({count} {direction} {peer}, tag {message.tag})"


class MessageWork(Work):
    """A handle of Gloo whose errors name the other rank.

    Args:
        explain: makes the error to raise of Gloo's error and the limit of the wait in seconds.
        message: its kind, the other global rank and its numbers, for the progress word.
    """

    def __init__(
        self,
        work: Work,
        tensor: Tensor,
        explain: Callable[[RuntimeError, float], RuntimeError],
        message: tuple[int, int, int],
    ) -> None:
        super().__init__()
        self._work, self._tensor, self._explain = work, tensor, explain
        self._message = message

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until a send has left or a recv has arrived.

        Raises: CollectiveFailed: the message was not complete in time. PeerLost: the other rank has
            ended or left the group.
        """
        progress = own_progress()
        start_ns = now_ns()
        try:
            with progress.message_wait(*self._message):
                return bool(self._work.wait(timeout))
        except RuntimeError as error:
            raise self._explain(error, timeout.total_seconds()) from None
        finally:
            progress.add_waited(now_ns() - start_ns)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._tensor]

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        return self._source_rank()

    def _source_rank(self) -> int:
        return source_rank(self._work)
