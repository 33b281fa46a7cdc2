"""Messages between workers, servers and the coordinator, and their form in a frame.

    worker -> server        GRAD_MASK, PUSH, STEP, NORM, GRADIENT, PULL, LOAD, STATE, STATS, STOP,
                            USE_SHARED_MEMORY, RECORD, HISTORY
    server -> worker        PARAMS, MOVED, REFUSED; and answers, with the op of the request
    primary -> backup       SNAPSHOT, UPDATE_META, REPLICATE;  backup -> primary  ACKNOWLEDGE
    primary -> primary of another shard    TRANSFER
    server -> coordinator   JOIN, HEARTBEAT, IN_SYNC, TRANSFERRED
    worker -> coordinator   LEAVE;  user -> coordinator  ADD, REMOVE, LIST
    coordinator -> all      VIEW, PLACEMENT, LEAVE

Tensors, which are large, are the frame's payload, as they lie in memory. Small messages are JSON. A
partition with its optimizer state is a safetensors file in memory. Nothing is pickled, so a peer
cannot make this process run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

MAX_CONTROL_BYTES = 2**16
"""Bound on a refusal's text."""
FIRST_SERVER = 2**24
"""In handshakes, a worker has its own number, and server n has the number FIRST_SERVER + n."""
FIRST_HOST_ID, FIRST_USER = FIRST_SERVER - 2**20, FIRST_SERVER - 2**21
"""First of 2**20 random numbers: of the pools that watch a host's servers, and of users."""
PLACEMENT_BYTES = 2**24
"""Bound on a message of the coordinator, which takes a few bytes for each partition."""

SHARED, BLOCKS = 1, 2
"""Flags of PUSH and PARAMS.

SHARED: the values are in shared memory. In a PUSH, `epoch` and `worker` carry their offset.
BLOCKS: the payload has only the blocks that are not zero, or have changed; see `sparse_blocks.py`.
"""


class Op(IntEnum):
    """Operation of a frame. The numbers are part of the protocol: other versions read them."""

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
    RECORD = 31
    HISTORY = 32


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a flat contiguous CPU tensor as bytes, without a copy."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def pack_partition(
    values: Tensor, state: Sequence[Mapping[str, Any]], done: Mapping[int, int]
) -> bytes:
    """Pack a partition with its optimizer state.

    Args:
        values: flat.
        state: of the optimizer, for each segment: tensors and plain numbers.
        done: worker -> steps of that worker that the values include.
    """
    tensors = {"values": values}
    numbers: list[dict[str, Any]] = []
    for index, segment_state in enumerate(state):
        numbers.append({})
        for key, value in segment_state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                numbers[index][key] = value
    return safetensors.torch.save(
        {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()},
        {"numbers": json.dumps(numbers), "done": json.dumps(sorted(done.items()))},
    )


def unpack_part(payload: memoryview) -> tuple[Tensor, list[dict[str, Any]], dict[int, int]]:
    """Return values, state and steps of the result of `pack_partition`.

    Raises:
        SafetensorError, LookupError, TypeError, ValueError: it is something else.
    """
    data = bytes(payload)
    tensors = safetensors.torch.load(data)
    # safetensors gives no access to the metadata of bytes: 8 bytes of length, then JSON.
    header_bytes = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + header_bytes])["__metadata__"]
    state: list[dict[str, Any]] = json.loads(metadata["numbers"])
    done = {int(worker): int(steps) for worker, steps in json.loads(metadata["done"])}
    values = tensors.pop("values")
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state[int(index)][key] = tensor
    return values, state, done


def unpack(payload: memoryview) -> Any:
    """Read a JSON message. Raises ValueError for another one."""
    return json.loads(bytes(payload))
