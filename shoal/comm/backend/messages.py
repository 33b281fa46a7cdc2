"""Messages from one rank to another, as torch.distributed asks for them: through memory on one host, else by Gloo."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.comm.backend.calling import Calling
from shoal.comm.backend.courier import Courier
from shoal.comm.backend.pending import Receiving, Sending
from shoal.comm.backend.watched import watch_work
from shoal.errors import UsageError
from shoal.torch_private.c10d import backend_for


class Messages(Calling):
    """send, recv, and recv from whoever sends.

    Which way a message goes depends on its two ranks alone, which both know, and not on the tensor: what one rank sends
    through memory the other must not await from Gloo.
    """

    _courier: Courier | None
    _here: Sequence[int]  # the ranks of the group on this host

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        if self._courier is None or not self._is_near(receiver, tensors[0]):
            return self._leave("send", tensors, tensors, receiver, tag)
        return self._carry(self._courier, Sending, tensors[0], receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        if self._courier is None or not self._is_near(sender, tensors[0]):
            return self._leave("recv", tensors, tensors, sender, tag)
        return self._carry(self._courier, Receiving, tensors[0], sender, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        if self._courier is None or not tensors[0].is_cpu:
            backend = backend_for(self, tensors[0].device)
            return backend.recv_anysource(tensors, tag)  # type: ignore[no-any-return]
        if len(self._here) < self.size():
            raise UsageError(
                f"recv without a sender in a {self} of which ranks {[self._ranks[rank] for rank in self._here]} are on "
                "one host: messages inside a host and between hosts go different ways, and nobody can wait on both. "
                "Say whose message it is (src=)."
            )
        return self._carry(self._courier, Receiving, tensors[0], None, tag)

    def _is_near(self, other: int, tensor: Tensor) -> bool:
        return other in self._here and other != self.rank() and tensor.is_cpu

    def _carry(
        self, courier: Courier, kind: type[Sending] | type[Receiving], tensor: Tensor, other: int | None, tag: int
    ) -> Work:
        place = None if other is None else self._here.index(other)
        if self.recorder is None:
            return courier.take(kind(tensor, place, tag))
        flight = self._departs(self.recorder, kind.kind, tensor.nbytes, (tensor, other, tag))
        return watch_work(self.recorder, flight, lambda: courier.take(kind(tensor, place, tag, flight)), tells=False)
