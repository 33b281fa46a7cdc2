"""What workers, servers and replicas say to each other, and how it stands in a frame.

    worker -> server     PRESENT, PUSH, ORDER, NORM, GRADIENT, PULL, LOAD, STATE, FIGURES, STOP, SHARE, RECORD, HISTORY
    server -> worker     VALUE, MOVED, and the answers to questions under the question's own number
    primary -> backup    FILL, ABOUT, APPLY;  backup -> primary  ACKNOWLEDGE;  primary -> another shard's  GIVE
    server -> arbiter    JOIN, BEAT, IN_SYNC, HELD;  worker -> arbiter  BYE, SPEEDS;  arbiter -> all  VIEW, PLACEMENT
    a user -> arbiter    ADD, REMOVE, LIST

Numbers that are large, gradients and values, are the frame's payload, as they lie in memory. What
is small is JSON. A part's whole state is a safetensors file in memory. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.parameter_server.events import ProtocolViolation, StepRequest

MAX_CONTROL_BYTES = 2**16
"""The longest message that is no part."""
FIRST_SERVER = 2**24
"""On a connection, workers are known by their numbers, and servers by theirs from here on."""
FIRST_HOST_ID, FIRST_USER = FIRST_SERVER - 2**20, FIRST_SERVER - 2**21
"""Who keeps a machine's servers alive, and who asks from outside: 2**20 random numbers each."""
PLACEMENT_BYTES = 2**24
"""The longest message of the arbiter: a few bytes for each part."""


SHARED, BLOCKS = 1, 2
"""Flags of a PUSH or a VALUE. SHARED: the numbers lie in shared memory; a PUSH says where, in
`epoch` and `worker`.
BLOCKS: the payload has those blocks alone that are not zero, or have changed; see `blocks.py`."""


class Op(IntEnum):
    """The first field of a frame."""

    PUSH = 1
    GRAD_MASK = 2
    STEP = 3
    NORM = 4
    GRADIENT = 5
    LOAD = 6
    STATE = 7
    STATS = 8
    PARAMS = 9
    REPLICATE = 10
    SNAPSHOT = 11
    ACKNOWLEDGE = 12
    REFUSED = 13
    PULL = 14
    STOP = 15
    JOIN = 16
    HEARTBEAT = 17
    VIEW = 18
    IN_SYNC = 19
    LEAVE = 20
    UPDATE_META = 21
    USE_SHARED_MEMORY = 22
    PLACEMENT = 23
    TRANSFER = 24
    TRANSFERRED = 25
    MOVED = 26
    ADD = 27
    REMOVE = 28
    LIST = 29
    BANDWIDTHS = 30
    RECORD = 31
    HISTORY = 32


def as_bytes(tensor: Tensor) -> memoryview:
    """A flat contiguous CPU tensor's own memory, as bytes."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def pack_order(order: StepRequest) -> bytes:
    return json.dumps({"settings": order.settings, "scale": order.scale}).encode()


def unpack_order(payload: memoryview) -> StepRequest:
    """Raises Refused."""
    found = unpack(payload)
    if not isinstance(found, dict) or not isinstance(found.get("settings"), list):
        raise ProtocolViolation("an order without settings")
    if not isinstance(found.get("scale"), float) or not all(
        isinstance(each, dict) for each in found["settings"]
    ):
        raise ProtocolViolation("an order without a scale, or with settings that are none")
    return StepRequest(found["settings"], found["scale"])


def pack_partition(
    values: Tensor, state: list[Mapping[str, Any]], done: Mapping[int, int]
) -> bytes:
    """A part's numbers, its optimizer's state for each segment, and how many steps of each
    worker they include.
    """
    tensors = {"values": values}
    numbers: list[dict[str, Any]] = []
    for index, kept in enumerate(state):
        tensors |= {
            f"{index}.{key}": value for key, value in kept.items() if isinstance(value, Tensor)
        }
        numbers.append({key: value for key, value in kept.items() if not isinstance(value, Tensor)})
    return safetensors.torch.save(
        {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
        {"numbers": json.dumps(numbers), "done": json.dumps(sorted(done.items()))},
    )


def unpack_part(payload: memoryview) -> tuple[Tensor, list[dict[str, Any]], dict[int, int]]:
    """The inverse of `pack_part`. Raises Refused."""
    data = bytes(payload)
    try:
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        facts = json.loads(data[8 : 8 + size])["__metadata__"]
        state: list[dict[str, Any]] = json.loads(facts["numbers"])
        done = {int(worker): int(steps) for worker, steps in json.loads(facts["done"])}
        values = tensors.pop("values")
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            state[int(index)][key] = tensor
    except (SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ProtocolViolation(f"a part's state that cannot be read: {error}") from error
    return values, state, done


def unpack(payload: memoryview) -> Any:
    """A small message. Raises Refused."""
    try:
        return json.loads(bytes(payload))
    except ValueError as error:
        raise ProtocolViolation(f"a message that is no JSON: {error}") from error
