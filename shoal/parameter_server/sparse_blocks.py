"""Sparse gradients and small changes: a message with only those blocks of a partition that are not
zero, or that have changed. No value is lost.

    partition  | 0 0 .. 0 | 3 1 .. 2 | 0 0 .. 0 | 7 0 .. 0 |    blocks of 32 values; the last may
                                                                be shorter
    message      0 1 0 1    3 1 .. 2   7 0 .. 0                 a bit for each block, then blocks

Embeddings with `sparse=True` gain by it: a batch uses few rows, and a step without momentum or
weight decay changes no others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shoal.parameter_server.events import ProtocolViolation

BLOCK = 32
"""Values of a block."""
MAX_DENSITY = 0.5
"""Share of blocks above which all of the partition is sent."""


def nonzero_blocks(numbers: Tensor) -> Tensor:
    """Find the blocks of a flat tensor in which a bit is set, so that -0.0 counts as a value.

    Returns:
        Bool, one for each block.
    """
    full_blocks, remainder = _blocks(numbers)
    mask = full_blocks.any(dim=1).bool()
    return torch.cat([mask, remainder.any().bool().view(1)]) if len(remainder) else mask


def changed(before: Tensor, after: Tensor) -> Tensor:
    """Find the blocks in which two flat tensors differ, bit for bit; bool, one for each block."""
    difference = before.view(torch.uint8) ^ after.view(torch.uint8)
    return nonzero_blocks(difference.view(before.dtype))


def are_few(which: Tensor) -> bool:
    """Return whether a message of the blocks of this mask is worth packing."""
    return float(which.float().mean()) < MAX_DENSITY


def pack(numbers: Tensor, which: Tensor) -> Tensor:
    """Pack blocks of a flat tensor into a message.

    Args:
        which: bool, one for each block.

    Returns:
        The message, uint8.
    """
    bits = torch.from_numpy(np.packbits(which.numpy(), bitorder="little"))
    full_blocks, remainder = _blocks(numbers)
    chunks = [bits, full_blocks[which[: len(full_blocks)]].flatten()]
    if len(remainder) and which[-1]:
        chunks.append(remainder)
    return torch.cat(chunks)


def unpack(message: memoryview, into: Tensor) -> None:
    """Write the blocks of a message into a flat tensor, and leave its other blocks unchanged.

    Raises:
        ProtocolViolation: the message has a wrong length.
    """
    full_blocks, remainder = _blocks(into)
    count = len(full_blocks) + (len(remainder) > 0)
    bits_bytes = -(-count // 8)
    if len(message) < bits_bytes:
        raise ProtocolViolation(
            f"blocks in a message of {len(message)} bytes, where {count} blocks take {bits_bytes} "
            "to name"
        )
    bits = np.frombuffer(message, np.uint8, bits_bytes)
    mask = torch.from_numpy(np.unpackbits(bits, count=count, bitorder="little")).bool()
    has_remainder = len(remainder) > 0 and bool(mask[-1])
    full_mask = mask[: len(full_blocks)]
    block_bytes = BLOCK * into.itemsize
    blocks_bytes = int(full_mask.sum()) * block_bytes
    if len(message) != bits_bytes + blocks_bytes + len(remainder) * has_remainder:
        raise ProtocolViolation(
            f"blocks in a message of {len(message)} bytes, which names {bits_bytes + blocks_bytes} "
            "or so"
        )
    # torch.frombuffer refuses an empty range.
    if blocks_bytes:
        blocks = torch.frombuffer(message, dtype=torch.uint8, count=blocks_bytes, offset=bits_bytes)
        full_blocks[full_mask] = blocks.view(-1, block_bytes)
    if has_remainder:
        start = bits_bytes + blocks_bytes
        remainder.copy_(torch.frombuffer(message, dtype=torch.uint8, offset=start))


def _blocks(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a flat tensor's memory: its full blocks, one a row, and the remainder.

    Both are uint8."""
    as_bytes = numbers.view(torch.uint8)
    block_bytes = BLOCK * numbers.itemsize
    end = len(as_bytes) // block_bytes * block_bytes
    return as_bytes[:end].view(-1, block_bytes), as_bytes[end:]
