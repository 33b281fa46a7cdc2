"""The signature of a collective, in one word of 63 bits. Every rank publishes the word of its call,
and all other ranks compare it with theirs.

bits   0-4    5-8         9-14    15-24   25-62
       kind   operation   dtype   root    elements on each rank
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from shoal.platform.tensors import DTYPE_NUMBERS, DTYPES
from shoal.watchdog.progress_word import COLLECTIVES

OPERATIONS = ("", "sum", "avg", "product", "min", "max")
MAX_RANKS = 1 << 10


class CallSignature(NamedTuple):
    """A collective as all ranks must call it.

    Args:
        kind: one of COLLECTIVES.
        dtype: of the elements.
        length: elements on each rank; 0 for a call in which ranks may differ in it.
        operation: one of OPERATIONS; "" if nothing is reduced.
        root: rank in the group, for calls that have a root.
    """

    kind: str
    dtype: torch.dtype = torch.uint8
    length: int = 0
    operation: str = ""
    root: int = 0

    @property
    def encoded(self) -> int:
        """Encode this call as an integer below 2**63."""
        return (
            COLLECTIVES.index(self.kind)
            | OPERATIONS.index(self.operation) << 5
            | DTYPE_NUMBERS[self.dtype] << 9
            | self.root << 15
            | (self.length & (1 << 38) - 1) << 25
        )

    def describe(self) -> str:
        """Describe this call for error messages, such as `all_reduce(1,000 x float32, sum)`."""
        if self.kind == "barrier":
            return "barrier()"
        arguments = [str(self.dtype)]
        if self.length:
            arguments = [f"{self.length:,} x {str(self.dtype).removeprefix('torch.')}"]
        if self.operation:
            arguments.append(self.operation)
        if self.kind == "broadcast":
            arguments.append(f"root {self.root}")
        return f"{self.kind}({', '.join(arguments)})"


@lru_cache(4096)
def signature(
    kind: str, dtype: torch.dtype, length: int, operation: str = "", root: int = 0
) -> tuple[CallSignature, int]:
    """Return a signature and its encoding."""
    call = CallSignature(kind, dtype, length, operation, root)
    return call, call.encoded


def decode(word: int) -> CallSignature:
    """Decode a word of `CallSignature.encoded`.

    A damaged word gives some signature and no error, because the result is for an error message.
    """
    return CallSignature(
        COLLECTIVES[(word & 31) % len(COLLECTIVES)],
        DTYPES[(word >> 9 & 63) % len(DTYPES)],
        word >> 25,
        OPERATIONS[(word >> 5 & 15) % len(OPERATIONS)],
        word >> 15 & MAX_RANKS - 1,
    )
