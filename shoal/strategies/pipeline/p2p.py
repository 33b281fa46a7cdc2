"""Send and receive between stages: activations forward, their gradients backward.

      stage 1 on rank 1   ── header ─ x ─ shortcut ──>   stage 2 on rank 2     first of a shape
                          ── x ─ shortcut ───────────>                         all others
                          <─ gradient of x ─ gradient of shortcut ──

`StageComm` moves the messages of one step (`stage_messages.py`), over a `P2PLink` that moves single
tensors and lives as long as the run.

[1] *Headers.* The header of activations has their dtypes and shapes. It is sent once for each shape
    of the model's inputs. All ranks of a pipeline see the same inputs, so sender and receiver agree
    on when a header comes.
[2] *Masks.* Gradients have the shapes of the activations, so their header is only a mask: which
    activations have a gradient. Where there is none, none is sent. A zero gradient would be wrong:
    momentum and weight decay would still change the weight.
[3] *Contiguous.* Every tensor is made contiguous before it is sent. A `batch_first` LSTM returns a
    transposed tensor, for example, which Gloo refuses and NCCL may corrupt (pytorch#62283).
[4] *Release.* A message also shows that its sender has received what was sent before
    (`acknowledged`). Those tensors are freed then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.strategies.pipeline.p2p_link import HeaderKey, P2PLink, PendingRecv
from shoal.strategies.pipeline.schedule_table import ScheduleTable
from shoal.strategies.pipeline.stage_messages import (
    HEADER_LENGTH,
    GradMask,
    Message,
    TensorMeta,
    TensorMetas,
    acknowledged,
    decode_mask,
    decode_metas,
    describe_mask,
    describe_metas,
    encode_mask,
    encode_metas,
    messages,
    receiver_of,
    sender_of,
)

Header = TypeVar("Header", TensorMetas, GradMask)


class StageComm:
    """The messages of one step, on one rank.

    A message between two stages of this rank is not sent: it is handed over in memory.

    Args:
        link: moves the tensors.
        table: the schedule, which says who sends what in which order.
        key_of: micro-batch -> what determines the shapes of its values; equal on all ranks.
        backward: gradients come back too; False in evaluation.
    """

    def __init__(
        self,
        link: P2PLink,
        table: ScheduleTable,
        key_of: Callable[[int], Hashable],
        backward: bool = True,
    ) -> None:
        self.link = link
        self.table = table
        self.key_of = key_of
        self.rank = link.axis.rank
        # Messages whose receive is not posted yet, for each sender in its order of sending.
        self._unposted = {
            sender: deque(
                m for m in messages(table, sender, self.rank) if backward or m.kind == "F"
            )
            for sender in range(table.num_ranks)
        }
        self._posted: dict[Message, list[PendingRecv]] = {}
        self._handed_over: dict[Message, list[Tensor | None]] = {}
        self._metas: dict[Message, TensorMetas] = {}
        # Message -> how many tensors had been sent to its receiver when it was sent.
        self._sent_until: dict[Message, int] = {}

    def send_forward(self, message: Message, values: Sequence[Tensor]) -> None:
        """Send activations to the next stage.

        Raises: UsageError: dtypes or shapes differ from those of an earlier message, though the
            inputs have the same shapes.
        """
        receiver = receiver_of(self.table, message)
        metas = tuple(TensorMeta(v.dtype, tuple(v.shape), v.requires_grad) for v in values)
        self._metas[message] = metas
        if receiver != self.rank:
            self._send_metas(message, metas, receiver)
        self._send(message, values, receiver)

    def send_backward(self, message: Message, gradients: Sequence[Tensor | None]) -> None:
        """Send gradients to the stage before; None for a value that has no gradient.

        Raises: UsageError: other values have a gradient than in an earlier message.
        """
        receiver = receiver_of(self.table, message)
        if receiver != self.rank and gradients:
            mask = tuple(gradient is not None for gradient in gradients)
            self._send_mask(message, mask, receiver)
        self._send(message, gradients, receiver)

    def recv_forward(self, message: Message) -> tuple[list[Tensor], TensorMetas]:
        """Receive activations. Blocks."""
        tensors = [tensor for tensor in self._receive(message) if tensor is not None]
        return tensors, self._activation_metas(message)

    def recv_backward(self, message: Message) -> list[Tensor | None]:
        """Receive gradients, one for each value that can have one; None where it has none.
        Blocks.
        """
        return self._receive(message)

    def post_recv(self, message: Message) -> None:
        """Post the receives of a message, and of all messages that its sender sends before it."""
        sender = sender_of(self.table, message)
        if sender == self.rank:
            return
        while message not in self._posted:
            following = self._unposted[sender].popleft()
            with self.link.recorder.tagged(f"{following.kind}{following.microbatch}"):
                metas = self._expected_metas(following, sender)
                self._posted[following] = [self.link.post_recv(meta, sender) for meta in metas]

    def can_post_recv(self, message: Message) -> bool:
        """Return whether `post_recv` would not block: no header has to be received first."""
        sender = sender_of(self.table, message)
        if sender == self.rank or message in self._posted:
            return False
        for following in self._unposted[sender]:
            if not self._is_header_known(following):
                return False
            if following == message:
                return True
        return False

    def _is_header_known(self, message: Message) -> bool:
        if message.kind == "F":
            return self._key(message) in self.link.received_metas
        if message._replace(kind="F") not in self._metas:
            return False
        has_mask = self._key(message) in self.link.received_masks
        return has_mask or not self._differentiable_metas(message)

    def _send(self, message: Message, values: Sequence[Tensor | None], receiver: int) -> None:
        if receiver == self.rank:
            detached = [None if value is None else value.detach() for value in values]
            self._handed_over[message] = detached
            return
        with self.link.recorder.tagged(f"{message.kind}{message.microbatch}"):
            for value in values:
                if value is not None:
                    self._sent_until[message] = self.link.send(value, receiver)

    def _receive(self, message: Message) -> list[Tensor | None]:
        if message in self._handed_over:
            return self._handed_over.pop(message)
        if message not in self._posted:
            self.post_recv(message)
        tensors = []
        for pending in self._posted.pop(message):
            pending.work.wait()
            tensors.append(pending.tensor)
        if tensors:  # a message without a tensor has not arrived: it was never sent
            self._release_acknowledged(message)
        if message.kind == "F":
            return [*tensors]
        gradients = iter(tensors)
        return [next(gradients) if present else None for present in self._grad_mask(message)]

    def _release_acknowledged(self, message: Message) -> None:
        """[4] Free the tensors of which the arrival of `message` shows that its sender has them."""
        received = acknowledged(self.table, message)
        if received in self._sent_until:
            count = self._sent_until.pop(received)
            self.link.release(sender_of(self.table, message), count)

    # --- headers

    def _send_metas(self, message: Message, metas: TensorMetas, receiver: int) -> None:
        """[1] Send a header unless it is known; check that it is still true."""
        known = self._send_header(self.link.sent_metas, message, metas, encode_metas, receiver)
        if known != metas:
            raise UsageError(
                f"pipeline: stage {message.stage} gave {describe_metas(metas)} where for inputs of "
                f"the same shape it gave {describe_metas(known)} before. What crosses a cut must "
                "follow from the shapes of the model's inputs; put the cut elsewhere with "
                "cuts=NAME."
            )

    def _send_mask(self, message: Message, mask: GradMask, receiver: int) -> None:
        """[2] Send a mask unless it is known; check that it is still true."""
        known = self._send_header(self.link.sent_masks, message, mask, encode_mask, receiver)
        if known != mask:
            raise UsageError(
                f"pipeline: of the {len(mask)} values that cross from stage {message.stage} to "
                f"the next, the loss depended on {describe_mask(known)} before and depends on "
                f"{describe_mask(mask)} now. Keep every part in the loss, and multiply by zero "
                "what is not to count for a while."
            )

    def _send_header(
        self,
        sent: dict[HeaderKey, Header],
        message: Message,
        header: Header,
        encode: Callable[[Header, torch.device], Tensor],
        receiver: int,
    ) -> Header:
        """Send the header of the first message of its key. Return that of the first message."""
        key = self._key(message)
        if key not in sent:
            sent[key] = header
            self.link.send(encode(header, self.link.axis.device), receiver)
        return sent[key]

    def _expected_metas(self, message: Message, sender: int) -> TensorMetas:
        """Return the metas of the tensors of a message; receive its header if it is unknown."""
        key = self._key(message)
        if message.kind == "F":
            if key not in self.link.received_metas:
                header = self.link.recv_header(HEADER_LENGTH, sender)
                self.link.received_metas[key] = decode_metas(header)
            self._metas[message] = self.link.received_metas[key]
            return self._metas[message]
        candidates = self._differentiable_metas(message)
        if candidates and key not in self.link.received_masks:
            header = self.link.recv_header(len(candidates), sender)
            self.link.received_masks[key] = decode_mask(header)
        pairs = zip(candidates, self._grad_mask(message), strict=True)
        return tuple(meta for meta, present in pairs if present)

    def _activation_metas(self, message: Message) -> TensorMetas:
        return self._metas[message._replace(kind="F")]

    def _differentiable_metas(self, message: Message) -> TensorMetas:
        return tuple(meta for meta in self._activation_metas(message) if meta.has_gradient)

    def _grad_mask(self, message: Message) -> GradMask:
        if not self._differentiable_metas(message):
            return ()
        return self.link.received_masks[self._key(message)]

    def _key(self, message: Message) -> HeaderKey:
        return message.stage, self.key_of(message.microbatch)
