"""A part of which little is not zero, or has changed, as those blocks of it alone. Nothing is lost.

    part       | 0 0 .. 0 | 3 1 .. 2 | 0 0 .. 0 | 7 0 .. 0 |      blocks of 32 numbers, the last may be shorter
    message      0 1 0 1    3 1 .. 2   7 0 .. 0                   a bit for each block, then the blocks

For embeddings with `sparse=True`: a batch touches few rows, and a step without momentum or decay
changes no others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shoal.parameter_server.events import ProtocolViolation

BLOCK = 32
MAX_DENSITY = 0.5
"""The share of blocks above which a part is sent whole."""


def nonzero_blocks(numbers: Tensor) -> Tensor:
    """Which blocks of a flat tensor hold anything but zeros, bit for bit; bool, one for each
    block.
    """
    as_bytes = numbers.view(torch.uint8)
    block_bytes = BLOCK * numbers.itemsize
    whole = len(as_bytes) // block_bytes * block_bytes
    found = as_bytes[:whole].view(-1, block_bytes).any(dim=1).bool()
    rest = as_bytes[whole:]
    return torch.cat([found, rest.any().bool().view(1)]) if len(rest) else found


def changed(before: Tensor, after: Tensor) -> Tensor:
    """Which blocks of two flat tensors differ, bit for bit."""
    differing = before.view(torch.uint8) ^ after.view(torch.uint8)
    return nonzero_blocks(differing.view(before.dtype))


def are_few(which: Tensor) -> bool:
    """Whether a message of these blocks is worth its while."""
    return float(which.float().mean()) < MAX_DENSITY


def pack(numbers: Tensor, which: Tensor) -> Tensor:
    """These blocks of a flat tensor as a message of bytes."""
    bits = torch.from_numpy(np.packbits(which.numpy(), bitorder="little"))
    whole, rest = _blocks(numbers)
    pieces = [bits, whole[which[: len(whole)]].flatten()]
    if len(rest) and which[-1]:
        pieces.append(rest)
    return torch.cat(pieces)


def unpack(message: memoryview, into: Tensor) -> None:
    """Write the blocks of a message where they belong; the others stay. Raises Refused: it is
    of another length.
    """
    whole, rest = _blocks(into)
    count = len(whole) + (len(rest) > 0)
    bits_bytes = -(-count // 8)
    if len(message) < bits_bytes:
        raise ProtocolViolation(
            f"blocks in a message of {len(message)} bytes, where {count} blocks take {bits_bytes} "
            "to name"
        )
    found = np.unpackbits(
        np.frombuffer(message, np.uint8, bits_bytes), count=count, bitorder="little"
    )
    which = torch.from_numpy(found).bool()
    has_rest = len(rest) > 0 and bool(which[-1])
    inner = which[: len(whole)]
    inner_bytes = int(inner.sum()) * BLOCK * into.itemsize
    if len(message) != bits_bytes + inner_bytes + len(rest) * has_rest:
        raise ProtocolViolation(
            f"blocks in a message of {len(message)} bytes, which names {bits_bytes + inner_bytes} "
            "or so"
        )
    if inner_bytes:
        body = torch.frombuffer(message, dtype=torch.uint8, count=inner_bytes, offset=bits_bytes)
        whole[inner] = body.view(-1, BLOCK * into.itemsize)
    if has_rest:
        rest.copy_(torch.frombuffer(message, dtype=torch.uint8, offset=bits_bytes + inner_bytes))


def _blocks(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Windows on the bytes of all whole blocks, and on what is left."""
    as_bytes, block_bytes = numbers.view(torch.uint8), BLOCK * numbers.itemsize
    end = len(as_bytes) // block_bytes * block_bytes
    return as_bytes[:end].view(-1, block_bytes), as_bytes[end:]
