"""What crosses the cuts: lists of tensors from one rank to the next, forward, and their gradients,
backward.

      stage 1 on rank 1   ── header ─ x ─ shortcut ──>   stage 2 on rank 2        the first micro-batch of a shape
                          ── x ─ shortcut ───────────>                            all others
                          <─ gradient of x ─ gradient of shortcut ──

A header says types and shapes; it comes once for each shape of the model's inputs, which all ranks
of a pipeline see.
Gradients have the shapes of what was sent, so theirs says only which of them there are: what the
loss does not depend on has none, and is to have none, for zeros would be stepped with momentum and
weight decay. Everything is contiguous
when it is sent, whatever the stages make of it: a `batch_first` LSTM gives a transposed tensor,
which Gloo refuses and NCCL may corrupt (pytorch#62283).

A rank asks for messages in the order in which their sender sends them, so that none needs a label.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.errors import UsageError
from shoal.strategies.pipeline.schedule_table import Action, ScheduleTable
from shoal.strategies.pipeline.tensor_meta import (
    HEADER,
    Forms,
    Present,
    TensorMeta,
    decoded,
    decoded_present,
    describe,
    describe_mask,
    encode_mask,
    encoded,
)
from shoal.trace.recorder import Recorder

Key = tuple[int, Hashable]
"""What a header is sent once for: a stage, and what the shapes of a micro-batch follow from."""
Header = TypeVar("Header", Forms, Present)


class Message(NamedTuple):
    """Values from stage to stage + 1 ("F"), or their gradients back ("B")."""

    kind: str
    stage: int
    microbatch: int


def messages(table: ScheduleTable, sender: int, receiver: int) -> list[Message]:
    """All that one rank sends another in a step, in the order in which it does."""
    found = []
    for action in table.rows[sender]:
        message = message_after(table, action)
        if message is not None and _goes_to(table, message) == receiver != sender:
            found.append(message)
    return found


def message_after(table: ScheduleTable, action: Action) -> Message | None:
    """What an action gives to another stage."""
    if action.kind == "F" and action.stage < table.num_stages - 1:
        return Message("F", action.stage, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


def message_before(table: ScheduleTable, action: Action) -> Message | None:
    """What an action needs from another stage."""
    if action.kind == "F" and action.stage > 0:
        return Message("F", action.stage - 1, action.microbatch)
    if action.kind in "BI" and action.stage < table.num_stages - 1:
        return Message("B", action.stage, action.microbatch)
    return None


def _goes_to(table: ScheduleTable, message: Message) -> int:
    return table.rank_of(message.stage + 1 if message.kind == "F" else message.stage)


class P2PLink:
    """One rank's connections to the other ranks of its pipeline, for the whole run.

    Args: axis: of the pipeline. recorder: is told which message is for which micro-batch.
    Collective over the world."""

    def __init__(self, axis: Axis, recorder: Recorder) -> None:
        self.axis, self.recorder = axis, recorder
        self.sent: dict[Key, Forms] = {}
        self.received: dict[Key, Forms] = {}
        self.sent_back: dict[Key, Present] = {}
        self.received_back: dict[Key, Present] = {}
        self.sent_bytes = 0
        self._work: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor, receiver: int) -> None:
        """Send without waiting; `tensor` is not to be written into afterwards."""
        tensor = tensor.detach().contiguous()
        self.sent_bytes += tensor.numel() * tensor.element_size()
        work = dist.isend(tensor, group=self.axis.group, group_dst=receiver)
        assert work is not None
        self._work.append((work, tensor))
        while self._work and self._work[0][0].is_completed():
            self._work.popleft()[0].wait()

    def receive(self, form: TensorMeta, sender: int) -> tuple[dist.Work, Tensor]:
        """Ask for a tensor; it is there once the work is done."""
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.axis.device)
        work = dist.irecv(tensor, group=self.axis.group, group_src=sender)
        assert work is not None
        return work, tensor

    def recv_header(self, count: int, sender: int) -> Tensor:
        """Wait for a header: (count,), int64."""
        header = torch.empty(count, dtype=torch.int64, device=self.axis.device)
        work = dist.irecv(header, group=self.axis.group, group_src=sender)
        assert work is not None
        work.wait()
        return header

    def flush(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._work:
            self._work.popleft()[0].wait()


class StageComm:
    """The messages of one step, seen from one rank.

    Args:
        key_of: micro-batch -> what the shapes of its values follow from; alike on all ranks.
        backward: gradients come back.
    """

    def __init__(
        self,
        wire: P2PLink,
        table: ScheduleTable,
        key_of: Callable[[int], Hashable],
        backward: bool = True,
    ) -> None:
        self.wire, self.table, self.key_of, self.rank = wire, table, key_of, wire.axis.rank
        self._coming = {
            sender: deque(
                m for m in messages(table, sender, self.rank) if backward or m.kind == "F"
            )
            for sender in range(table.num_ranks)
        }
        self._asked: dict[Message, list[tuple[dist.Work, Tensor]]] = {}
        self._given: dict[Message, list[Tensor | None]] = {}  # from a stage on this very rank
        self._forms: dict[Message, Forms] = {}

    def send_forward(self, message: Message, values: Sequence[Tensor]) -> None:
        """Hand values on, to whatever rank."""
        receiver = _goes_to(self.table, message)
        self._forms[message] = forms = tuple(
            TensorMeta(v.dtype, tuple(v.shape), v.requires_grad) for v in values
        )
        if receiver != self.rank:
            self._announce(message, forms, receiver)
        self._send(message, values, receiver)

    def send_backward(self, message: Message, gradients: Sequence[Tensor | None]) -> None:
        """Hand gradients on, to whatever rank; None where there is none."""
        receiver = _goes_to(self.table, message)
        if receiver != self.rank and gradients:
            self._announce_back(
                message, tuple(gradient is not None for gradient in gradients), receiver
            )
        self._send(message, gradients, receiver)

    def _send(self, message: Message, values: Sequence[Tensor | None], receiver: int) -> None:
        if receiver == self.rank:
            self._given[message] = [None if value is None else value.detach() for value in values]
            return
        with self.wire.recorder.tagged(f"{message.kind}{message.microbatch}"):
            for value in values:
                if value is not None:
                    self.wire.send(value, receiver)

    def recv_forward(self, message: Message) -> tuple[list[Tensor], Forms]:
        """Wait for values."""
        tensors = [tensor for tensor in self._taken(message) if tensor is not None]
        return tensors, self._form(message)

    def recv_backward(self, message: Message) -> list[Tensor | None]:
        """Wait for gradients: one for each value that can have one, None where it has none."""
        return self._taken(message)

    def _taken(self, message: Message) -> list[Tensor | None]:
        if message in self._given:
            return self._given.pop(message)
        if message not in self._asked:
            self.post_recv(message)
        tensors = []
        for work, tensor in self._asked.pop(message):
            work.wait()
            tensors.append(tensor)
        if message.kind == "F":
            return [*tensors]
        coming = iter(tensors)
        return [next(coming) if there else None for there in self._present(message)]

    def post_recv(self, message: Message) -> None:
        """Ask for a message, and for all that its sender sends before it."""
        sender = self.table.rank_of(message.stage if message.kind == "F" else message.stage + 1)
        if sender == self.rank:
            return
        coming = self._coming[sender]
        while message not in self._asked:
            following = coming.popleft()
            with self.wire.recorder.tagged(f"{following.kind}{following.microbatch}"):
                forms = self._expected(following, sender)
                self._asked[following] = [self.wire.receive(form, sender) for form in forms]

    def can_post_recv(self, message: Message) -> bool:
        """Whether asking waits for nothing: no header has to come first."""
        sender = self.table.rank_of(message.stage if message.kind == "F" else message.stage + 1)
        if sender == self.rank or message in self._asked:
            return False
        for following in self._coming[sender]:
            if following.kind == "F" and self._key(following) not in self.wire.received:
                return False
            if following.kind == "B":
                if following._replace(kind="F") not in self._forms:
                    return False
                if (
                    self._grads_to_send(following)
                    and self._key(following) not in self.wire.received_back
                ):
                    return False
            if following == message:
                return True
        return False

    def _form(self, message: Message) -> Forms:
        return self._forms[message._replace(kind="F")]

    def _announce(self, message: Message, forms: Forms, receiver: int) -> None:
        known = self._first(self.wire.sent, message, forms, encoded, receiver)
        if known != forms:
            raise UsageError(
                f"pipeline: stage {message.stage} gave {describe(forms)} where for inputs of the "
                "same shape it gave "
                f"{describe(known)} before. What crosses a cut must follow from the shapes of the "
                "model's inputs; put the "
                "cut elsewhere with cuts=NAME."
            )

    def _expected(self, message: Message, sender: int) -> Forms:
        if message.kind == "B":
            return self._expected_back(message, sender)
        key = self._key(message)
        if key not in self.wire.received:
            self.wire.received[key] = decoded(self.wire.recv_header(HEADER, sender))
        self._forms[message] = self.wire.received[key]
        return self._forms[message]

    def _announce_back(self, message: Message, present: Present, receiver: int) -> None:
        known = self._first(self.wire.sent_back, message, present, encode_mask, receiver)
        if known != present:
            raise UsageError(
                f"pipeline: of the {len(present)} values that cross from stage {message.stage} to "
                "the next, the loss "
                f"depended on {describe_mask(known)} before and depends on "
                f"{describe_mask(present)} now. Keep every part in the "
                "loss, and multiply by zero what is not to count for a while."
            )

    def _first(
        self,
        sent: dict[Key, Header],
        message: Message,
        said: Header,
        encode: Callable[[Header, torch.device], Tensor],
        receiver: int,
    ) -> Header:
        """What a header has said of messages like this; the first one's is sent now."""
        key = self._key(message)
        if key not in sent:
            sent[key] = said
            self.wire.send(encode(said, self.wire.axis.device), receiver)
        return sent[key]

    def _expected_back(self, message: Message, sender: int) -> Forms:
        wanted, key = self._grads_to_send(message), self._key(message)
        if wanted and key not in self.wire.received_back:
            self.wire.received_back[key] = decoded_present(
                self.wire.recv_header(len(wanted), sender)
            )
        return tuple(
            form for form, there in zip(wanted, self._present(message), strict=True) if there
        )

    def _present(self, message: Message) -> Present:
        return self.wire.received_back[self._key(message)] if self._grads_to_send(message) else ()

    def _grads_to_send(self, message: Message) -> Forms:
        return tuple(form for form in self._form(message) if form.has_gradient)

    def _key(self, message: Message) -> Key:
        return message.stage, self.key_of(message.microbatch)
