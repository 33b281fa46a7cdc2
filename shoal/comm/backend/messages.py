"""Messages from one rank to another, as torch.distributed asks for them."""

from __future__ import annotations

from torch import Tensor
from torch._C._distributed_c10d import Work

from shoal.comm.backend.calling import Calling


class Messages(Calling):
    """send, recv."""

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        return self._leave("send", tensors, tensors, receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        return self._leave("recv", tensors, tensors, sender, tag)
