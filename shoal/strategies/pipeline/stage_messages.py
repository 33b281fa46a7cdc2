"""The messages between the stages of a pipeline, as they follow from its schedule table.

      stage 1 on rank 1   ── message F(1, 0): activations of micro-batch 0 ──>   stage 2 on rank 2
                          <── message B(1, 0): their gradients ───────────────

Every rank knows the whole table, so every rank knows which messages it gets from whom, and in which
order. Messages therefore need no label: a rank receives from each sender in the order of sending.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.strategies.pipeline.schedule_table import Action, ScheduleTable


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
