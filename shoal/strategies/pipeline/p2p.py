"""Send and receive between stages: activations forward, their gradients backward.

      stage 1 on rank 1   ── header ─ x ─ shortcut ──>   stage 2 on rank 2     first of a shape
                          ── x ─ shortcut ───────────>                         all others
                          <─ gradient of x ─ gradient of shortcut ──           with headers alike

`StageComm` moves the messages of one step, over a `P2PLink` that moves single tensors and lives as
long as the run. Every rank knows the whole schedule table, so every rank knows which messages it
gets from whom, and in which order. Messages therefore need no label.

[1] *Headers* have what the table does not tell: dtype and shape of each tensor, and which has a
    gradient. One is sent once for each shape of the model's inputs, forward and backward. All ranks
    of a pipeline see the same inputs, so sender and receiver agree on when a header comes.
[2] *Missing gradients.* Where an activation has no gradient, none is sent, which the header tells.
    A zero gradient would be wrong: momentum and weight decay would still change the weight.
[3] *Contiguous.* Every tensor is made contiguous before it is sent. A `batch_first` LSTM returns a
    transposed tensor, for example, which Gloo refuses and NCCL may corrupt (pytorch#62283).
[4] *Release.* A tensor must stay alive until its send is complete. Gloo reports a send as complete
    only after `wait()`, and an early `wait()` would block. A message also shows that its sender has
    received what was sent before (`acknowledged`), so the wait is over at once; the tensors are
    freed then. Without this, a rank would keep the activations of all micro-batches until the end
    of the step.
[5] *Directions.* NCCL runs all messages of two ranks of a group one after the other, in the order
    in which each of them has started its own. A rank that has begun to receive a gradient could not
    send activations before it came, and its peer may wait for these. So on GPUs messages to lower
    ranks have a group of their own, and in each group two ranks start the same messages in the same
    order.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.costs.pass_table import Action
from shoal.errors import UsageError
from shoal.platform.tensors import DTYPE_NUMBERS, DTYPES
from shoal.strategies.pipeline.schedules import ScheduleTable
from shoal.trace.recorder import Recorder


class Message(NamedTuple):
    """Activations from `stage` to `stage + 1` ("F"), or their gradients back ("B")."""

    kind: str
    stage: int
    microbatch: int


def message_after(table: ScheduleTable, action: Action) -> Message | None:
    """Return the message that an action produces for another stage; None if there is none."""
    if action.kind == "F" and action.stage < table.num_stages - 1:
        return Message("F", action.stage, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


def message_before(table: ScheduleTable, action: Action) -> Message | None:
    """Return the message that an action needs from another stage; None if there is none."""
    if action.kind == "F" and action.stage > 0:
        return Message("F", action.stage - 1, action.microbatch)
    if action.kind in "BI" and action.stage < table.num_stages - 1:
        return Message("B", action.stage, action.microbatch)
    return None


def sender_of(table: ScheduleTable, message: Message) -> int:
    """Return the rank that sends a message."""
    return table.rank_of(message.stage if message.kind == "F" else message.stage + 1)


def receiver_of(table: ScheduleTable, message: Message) -> int:
    """Return the rank that receives a message."""
    return table.rank_of(message.stage + 1 if message.kind == "F" else message.stage)


def messages(table: ScheduleTable, sender: int, receiver: int) -> list[Message]:
    """List all messages of a step from one rank to another, in the order of sending."""
    sent = (message_after(table, action) for action in table.rows[sender])
    return [
        message
        for message in sent
        if message is not None and receiver_of(table, message) == receiver != sender
    ]


def acknowledged(table: ScheduleTable, message: Message) -> Message | None:
    """Return the latest message to the sender of `message` that its arrival acknowledges.

    A rank takes its actions in the order of its row, and an action waits for the message that it
    needs. Whoever gets `message` from a rank thus knows that this rank has received the messages of
    all its earlier actions.

          rank 0   send F(0,0)   send F(0,1)   send F(0,2)   receive B(0,0)
          rank 1   f0 needs F(0,0)  ──>  b0 sends B(0,0)      acknowledges F(0,0), not yet F(0,1)

    Returns: a message from the receiver of `message` to its sender. None: it acknowledges nothing.
    """
    sender = sender_of(table, message)
    receiver = receiver_of(table, message)
    row = table.rows[sender]
    index = row.index(_sending_action(table, message))
    while index >= 0:
        needed = message_before(table, row[index])
        if needed is not None and sender_of(table, needed) == receiver != sender:
            return needed
        index -= 1
    return None


def _sending_action(table: ScheduleTable, message: Message) -> Action:
    if message.kind == "F":
        return Action("F", message.stage, message.microbatch)
    backward = Action("B", message.stage + 1, message.microbatch)
    return backward if backward in table.actions else backward._replace(kind="I")


HEADER_BYTES = 1536
"""Length of a header. It is fixed, since the receiver does not know how many tensors come."""


class TensorMeta(NamedTuple):
    """The dtype and shape of a tensor; whether the loss is differentiated with respect to it, or,
    of a gradient, whether there is one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_gradient: bool


TensorMetas = tuple[TensorMeta, ...]
NO_GRADIENT = TensorMeta(torch.float32, (), False)


def encode_metas(metas: TensorMetas, device: torch.device) -> Tensor:
    """Return a header: (HEADER_BYTES,), uint8.

    Raises: UsageError: the tensors are too many for one header.
    """
    rows = [(DTYPE_NUMBERS[meta.dtype], meta.shape, meta.has_gradient) for meta in metas]
    text = json.dumps(rows).encode()
    if len(text) > HEADER_BYTES:
        raise UsageError(
            f"pipeline: {len(metas)} tensors cross one cut, more than a header describes. Put the "
            "cut where fewer do, with cuts=NAME."
        )
    return torch.tensor(list(text.ljust(HEADER_BYTES)), dtype=torch.uint8, device=device)


def decode_metas(header: Tensor) -> TensorMetas:
    """Return what `encode_metas` has encoded."""
    rows = json.loads(bytes(header.tolist()))
    return tuple(TensorMeta(DTYPES[number], tuple(shape), has) for number, shape, has in rows)


def describe_metas(metas: TensorMetas) -> str:
    """Describe tensors for an error message."""
    return ", ".join(
        f"{meta.dtype} {list(meta.shape)} {'with' if meta.has_gradient else 'without'} a gradient"
        for meta in metas
    )


def describe_present(metas: TensorMetas) -> str:
    """Name the values that have a gradient, for an error message."""
    present = [f"number {index}" for index, meta in enumerate(metas) if meta.has_gradient]
    return ", ".join(present) or "none"


HeaderKey = tuple[str, int, Hashable]
"""A header is sent once for each key: forward or backward, the stage, and what determines the
shapes of its values.
"""


PendingRecv = tuple[dist.Work, Tensor]
"""A posted receive: the tensor is filled when the work is complete."""


class P2PLink:
    """One rank's connections to the other ranks of its pipeline, for the whole run.

    Args:
        axis: the pipeline axis.
        recorder: records the messages in a trace.
        downward: the group for messages to lower ranks [5]; None for the group of the axis.

    Attributes:
        sent_headers, received_headers: of earlier messages.
    """

    def __init__(
        self, axis: Axis, recorder: Recorder, downward: dist.ProcessGroup | None = None
    ) -> None:
        self.axis = axis
        self._downward = downward or axis.group
        self.recorder = recorder
        self.sent_headers: dict[HeaderKey, TensorMetas] = {}
        self.received_headers: dict[HeaderKey, TensorMetas] = {}
        self._num_sent: Counter[int] = Counter()
        self._in_flight: dict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, tensor: Tensor, receiver: int) -> int:
        """Start a send and return at once. Do not write into `tensor` afterwards.

        Returns: how many tensors were sent to `receiver` in this run, for `release`.
        """
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._group(self.axis.rank, receiver), group_dst=receiver)
        assert work is not None
        in_flight = self._in_flight[receiver]
        in_flight.append((work, tensor))
        self._num_sent[receiver] += 1
        while in_flight and in_flight[0][0].is_completed():
            in_flight.popleft()[0].wait()
        return self._num_sent[receiver]

    def release(self, receiver: int, count: int) -> None:
        """Free the first `count` tensors that were sent to `receiver`; it must have received
        them.
        """
        in_flight = self._in_flight[receiver]
        while in_flight and self._num_sent[receiver] - len(in_flight) < count:
            in_flight.popleft()[0].wait()

    def post_recv(self, meta: TensorMeta, sender: int) -> PendingRecv:
        """Post a receive of one tensor and return at once."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.axis.device)
        work = dist.irecv(tensor, group=self._group(sender, self.axis.rank), group_src=sender)
        assert work is not None
        return work, tensor

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """Return the group in which `sender` sends to `receiver` [5]."""
        return self.axis.group if sender < receiver else self._downward

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for in_flight in self._in_flight.values():
            while in_flight:
                in_flight.popleft()[0].wait()


class StageComm:
    """The messages of one step, on one rank.

    A message between two stages of this rank is not sent: it is handed over in memory.

    Args:
        link: moves the tensors.
        table: the schedule, which says who sends what in which order.
        key_of: micro-batch -> what determines the shapes of its values; equal on all ranks.
    """

    def __init__(
        self,
        link: P2PLink,
        table: ScheduleTable,
        key_of: Callable[[int], Hashable],
    ) -> None:
        self.link = link
        self.table = table
        self.key_of = key_of
        self.rank = link.axis.rank
        # Messages whose receive is not posted yet, for each sender in its order of sending.
        self._unposted = {
            sender: deque(messages(table, sender, self.rank)) for sender in range(table.num_ranks)
        }
        self._posted: dict[Message, list[PendingRecv]] = {}
        self._handed_over: dict[Message, tuple[list[Tensor | None], TensorMetas]] = {}
        # Message -> how many tensors had been sent to its receiver when it was sent.
        self._sent_until: dict[Message, int] = {}

    def send(self, message: Message, values: Sequence[Tensor | None]) -> None:
        """Send activations to the next stage, or gradients to the stage before.

        Args: values: None for a value that has no gradient.

        Raises: UsageError: dtypes or shapes of activations differ from those of an earlier message,
            though the inputs have the same shapes; or other values have a gradient.
        """
        is_backward = message.kind == "B"
        metas = tuple(
            NO_GRADIENT
            if value is None
            else TensorMeta(value.dtype, tuple(value.shape), is_backward or value.requires_grad)
            for value in values
        )
        receiver = receiver_of(self.table, message)
        if receiver == self.rank:
            detached = [None if value is None else value.detach() for value in values]
            self._handed_over[message] = detached, metas
            return
        self._send_header(message, metas, receiver)
        with self.link.recorder.tagged(f"{message.kind}{message.microbatch}"):
            for value in values:
                if value is not None:
                    self._sent_until[message] = self.link.send(value, receiver)

    def recv_forward(self, message: Message) -> tuple[list[Tensor], TensorMetas]:
        """Receive activations. Blocks."""
        tensors, metas = self._receive(message)
        return [tensor for tensor in tensors if tensor is not None], metas

    def recv_backward(self, message: Message) -> list[Tensor | None]:
        """Receive gradients, one for each value that can have one; None where it has none.
        Blocks.
        """
        return self._receive(message)[0]

    def post_recv(self, message: Message) -> None:
        """Post the receives of a message, and of all messages that its sender sends before it."""
        sender = sender_of(self.table, message)
        if sender == self.rank:
            return
        while message not in self._posted:
            following = self._unposted[sender].popleft()
            with self.link.recorder.tagged(f"{following.kind}{following.microbatch}"):
                self._posted[following] = [
                    self.link.post_recv(meta, sender)
                    for meta in self._header(following, sender)
                    if following.kind == "F" or meta.has_gradient  # [2]
                ]

    def can_post_recv(self, message: Message) -> bool:
        """Return whether `post_recv` would not block: no header has to be received first."""
        sender = sender_of(self.table, message)
        if sender == self.rank or message in self._posted:
            return False
        for following in self._unposted[sender]:
            if self._key(following) not in self.link.received_headers:
                return False
            if following == message:
                return True
        return False

    def _receive(self, message: Message) -> tuple[list[Tensor | None], TensorMetas]:
        if message in self._handed_over:
            return self._handed_over.pop(message)
        if message not in self._posted:
            self.post_recv(message)
        tensors = []
        for work, tensor in self._posted.pop(message):
            work.wait()
            tensors.append(tensor)
        if tensors:  # a message without a tensor has not arrived: it was never sent
            self._release_acknowledged(message)
        metas = self.link.received_headers[self._key(message)]
        if message.kind == "F":
            return [*tensors], metas
        gradients = iter(tensors)
        return [next(gradients) if meta.has_gradient else None for meta in metas], metas

    def _release_acknowledged(self, message: Message) -> None:
        """[4] Free the tensors of which the arrival of `message` shows that its sender has them."""
        received = acknowledged(self.table, message)
        if received in self._sent_until:
            count = self._sent_until.pop(received)
            self.link.release(sender_of(self.table, message), count)

    # --- headers

    def _send_header(self, message: Message, metas: TensorMetas, receiver: int) -> None:
        """[1] Send a header unless it is known; check that it is still true."""
        key = self._key(message)
        known = self.link.sent_headers.get(key)
        if known is None:
            self.link.sent_headers[key] = metas
            self.link.send(encode_metas(metas, self.link.axis.device), receiver)
        elif known != metas and message.kind == "F":
            raise UsageError(
                f"pipeline: stage {message.stage} gave {describe_metas(metas)} where for inputs of "
                f"the same shape it gave {describe_metas(known)} before. What crosses a cut must "
                "follow from the shapes of the model's inputs; put the cut elsewhere with "
                "cuts=NAME."
            )
        elif known != metas:
            raise UsageError(
                f"pipeline: of the {len(metas)} values that cross from stage {message.stage} to "
                f"the next, the loss depended on {describe_present(known)} before and depends on "
                f"{describe_present(metas)} now. Keep every part in the loss, and multiply by zero "
                "what is not to count for a while."
            )

    def _header(self, message: Message, sender: int) -> TensorMetas:
        """Return the header of a message; receive it if it is unknown. Blocks then."""
        key = self._key(message)
        if key not in self.link.received_headers:
            meta = TensorMeta(torch.uint8, (HEADER_BYTES,), False)
            work, header = self.link.post_recv(meta, sender)
            work.wait()
            self.link.received_headers[key] = decode_metas(header)
        return self.link.received_headers[key]

    def _key(self, message: Message) -> HeaderKey:
        return message.kind, message.stage, self.key_of(message.microbatch)
