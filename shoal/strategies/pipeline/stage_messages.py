"""The messages between the stages of a pipeline, as they follow from its schedule table.

      stage 1 on rank 1   ── message F(1, 0): activations of micro-batch 0 ──>   stage 2 on rank 2
                          <── message B(1, 0): their gradients ───────────────

Every rank knows the whole table, so every rank knows which messages it gets from whom, and in which
order. Messages therefore need no label: a rank receives from each sender in the order of sending.

What the table does not tell stands in headers: number, dtypes and shapes of a message's tensors,
and which of them have a gradient, or are one.

      n │ dtype  has_gradient  dims  shape ... │ dtype  ...     256 numbers

Headers are int64 tensors, so they travel as every other message does.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.costs.pass_table import Action
from shoal.errors import UsageError
from shoal.platform.tensors import DTYPE_NUMBERS, DTYPES
from shoal.strategies.pipeline.schedule_table import ScheduleTable


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
    return backward if table.has(backward) else backward._replace(kind="I")


HEADER_LENGTH = 256
"""Numbers in a header. The length is fixed, since the receiver does not know how
many tensors come."""


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
    """Return a header: (HEADER_LENGTH,), int64.

    Raises: UsageError: the tensors are too many for one header.
    """
    numbers = [len(metas)]
    for meta in metas:
        numbers += [DTYPE_NUMBERS[meta.dtype], meta.has_gradient, len(meta.shape), *meta.shape]
    if len(numbers) > HEADER_LENGTH:
        raise UsageError(
            f"pipeline: {len(metas)} tensors cross one cut, more than a header describes. Put the "
            "cut where fewer do, with cuts=NAME."
        )
    padding = [0] * (HEADER_LENGTH - len(numbers))
    return torch.tensor(numbers + padding, dtype=torch.int64, device=device)


def decode_metas(header: Tensor) -> TensorMetas:
    """Return what `encode_metas` has encoded."""
    numbers = deque(header.tolist())
    metas = []
    for _ in range(numbers.popleft()):
        dtype = DTYPES[numbers.popleft()]
        has_gradient = bool(numbers.popleft())
        dims = numbers.popleft()
        shape = tuple(numbers.popleft() for _ in range(dims))
        metas.append(TensorMeta(dtype, shape, has_gradient))
    return tuple(metas)


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
