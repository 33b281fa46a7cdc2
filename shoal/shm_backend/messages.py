"""Messages from one rank to another, as torch.distributed asks for them.

      recv ──> Gloo ──> MessageWork ── wait() ──┬── the message
                                                └── Gloo's error ──> PeerLost, CollectiveFailed

Gloo carries them. Its errors say which connection broke; ours name the rank and its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.errors import CollectiveFailed, PeerLost
from shoal.platform.torch_private.c10d import backend_for
from shoal.shm_backend.call_queue import CompletedWork
from shoal.shm_backend.dispatch import CollectiveDispatch
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.traced_work import trace_work

NO_LIMIT = timedelta(0)
EXIT_S = 0.5  # between the end of a process's connections and that of the process


class MessageSignature(NamedTuple):
    """One end of a message.

    Args:
        kind: "send" or "recv".
        other: rank in the group; None for a recv from any rank.
    """

    kind: str
    tensor: Tensor
    other: int | None
    tag: int


class Messages(CollectiveDispatch):
    """send, recv, and recv from whoever sends."""

    _peers: PeerLiveness | None
    _host_ranks: Sequence[int]  # ranks of the group on this host
    _timeout_s: float

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        return self._post(MessageSignature("send", tensors[0], receiver, tag))

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        return self._post(MessageSignature("recv", tensors[0], sender, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._post(MessageSignature("recv", tensors[0], None, tag))

    def _post(self, message: MessageSignature) -> Work:
        tensor = message.tensor
        if not tensor.numel() and message.other is not None:
            return CompletedWork((tensor,))  # Gloo cannot receive a message without bytes
        if self.recorder is None:
            return self._start(message)
        args = (tensor, message.other, message.tag)
        flight = self._trace_start(self.recorder, message.kind, tensor.nbytes, args)
        return trace_work(self.recorder, flight, lambda: self._start(message), has_future=False)

    def _start(self, message: MessageSignature) -> Work:
        backend = backend_for(self, message.tensor.device)
        kind, tensor, other, tag = message
        try:
            if other is None:
                work = backend.recv_anysource([tensor], tag)
            elif kind == "recv":
                work = backend.recv([tensor], other, tag)
            else:
                work = backend.send([tensor], other, tag)
        except RuntimeError as error:
            raise self._explained(error, message, 0.0) from None

        def explain(error: RuntimeError, limit_s: float) -> RuntimeError:
            return self._explained(error, message, limit_s)

        return MessageWork(work, tensor, explain)

    def _explained(
        self, error: RuntimeError, message: MessageSignature, limit_s: float
    ) -> RuntimeError:
        """Make of Gloo's error one that names the other rank.

        An error that is not of the connection is returned as it is.

        Args:
            limit_s: how long was waited; 0 for the group's timeout.
        """
        text = str(error)
        if "Timed out" in text:
            return CollectiveFailed(self._who_is_late(message, limit_s or self._timeout_s))
        if "pair closure" in text:
            return CollectiveFailed(
                f"{self._describe(message)}: no messages pass between these ranks any more, "
                "since one was not complete within the timeout."
            )
        if "onnection" in text or "Broken pipe" in text:
            return PeerLost(self._who_is_lost(message))
        return error

    def _who_is_late(self, message: MessageSignature, limit_s: float) -> str:
        here, described = self._ranks[self.rank()], self._describe(message)
        waited = f"rank {here} waited {limit_s:g} s in {described}"
        if message.other is None:
            return f"{waited}."
        state = ""
        if self._peers is not None and message.other in self._host_ranks:
            place = self._host_ranks.index(message.other)
            state = f" (process {self._peers.pids[place]}), which {self._peers.state(place)}"
        return (
            f"{waited} for rank {self._ranks[message.other]}{state}. Every send needs its recv, "
            "with the same tag; a rank that computes for longer needs a longer timeout= in "
            "init_process_group."
        )

    def _who_is_lost(self, message: MessageSignature) -> str:
        here, described = self._ranks[self.rank()], self._describe(message)
        if message.other is None:
            return f"rank {here} waits in {described}, but another rank has ended or has left."
        name = f"rank {self._ranks[message.other]}"
        doing = f"while rank {here} waited for it in {described}."
        if self._peers is not None and message.other in self._host_ranks:
            place = self._host_ranks.index(message.other)
            if self._peers.has_ended(place, EXIT_S):
                return f"{name} (process {self._peers.pids[place]}) has ended {doing}"
        return f"{name} has ended, or has left the group, {doing}"

    def _describe(self, message: MessageSignature) -> str:
        """As a user reads it."""
        other = "any rank" if message.other is None else f"rank {self._ranks[message.other]}"
        direction = "to" if message.kind == "send" else "from"
        dtype = str(message.tensor.dtype).removeprefix("torch.")
        count = f"{message.tensor.numel():,} x {dtype}"
        return f"{message.kind}({count} {direction} {other}, tag {message.tag})"


class MessageWork(Work):
    """A handle of Gloo's whose errors name the other rank.

    Args: explain: Gloo's error, and the limit of the wait in seconds -> the error to raise.
    """

    def __init__(
        self, work: Work, tensor: Tensor, explain: Callable[[RuntimeError, float], RuntimeError]
    ) -> None:
        super().__init__()
        self._work, self._tensor, self._explain = work, tensor, explain

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until a send has left or a recv has arrived.

        Raises: CollectiveFailed: it was not complete in time. PeerLost: the other rank is gone.
        """
        try:
            return bool(self._work.wait(timeout))
        except RuntimeError as error:
            raise self._explain(error, timeout.total_seconds()) from None

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
        return int(self._work._source_rank())
