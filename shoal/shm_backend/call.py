"""What a rank says that it is doing: a collective, in one word of 63 bits that every other rank
compares with its own.

bits   0-4    5-8         9-14    15-24   25-62
       kind   operation   dtype   root    numbers on each rank
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shoal.platform.tensors import DTYPE_NUMBERS, DTYPES

KINDS = (
    *(
        "barrier",
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
    ),
    "all_to_all",
)
OPERATIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
MAX_RANKS = 1 << 10


class CallSignature(NamedTuple):
    """A collective as all ranks must call it.

    Args:
        kind: one of KINDS.
        dtype: of the numbers.
        length: numbers on each rank; of a call where ranks may differ in it, 0.
        operation: one of OPERATIONS; "" where nothing is reduced.
        root: rank in the group, where there is one.
    """

    kind: str
    dtype: torch.dtype = torch.uint8
    length: int = 0
    operation: str = ""
    root: int = 0

    @property
    def encoded(self) -> int:
        """This call as a number below 2**63."""
        kind, operation, dtype = (
            KINDS.index(self.kind),
            OPERATIONS.index(self.operation),
            DTYPE_NUMBERS[self.dtype],
        )
        return (
            kind
            | operation << 5
            | dtype << 9
            | self.root << 15
            | (self.length & (1 << 38) - 1) << 25
        )

    def describe(self) -> str:
        """As a user reads it."""
        root = (
            f", root {self.root}"
            if self.kind in ("broadcast", "reduce", "gather", "scatter")
            else ""
        )
        if self.kind == "barrier":
            return "barrier()"
        of = (
            f"{self.length:,} x {str(self.dtype).removeprefix('torch.')}"
            if self.length
            else str(self.dtype)
        )
        return f"{self.kind}({of}{', ' if self.operation else ''}{self.operation}{root})"


def decode(word: int) -> CallSignature:
    """The call that this number stands for."""
    return CallSignature(
        KINDS[(word & 31) % len(KINDS)],
        DTYPES[(word >> 9 & 63) % len(DTYPES)],
        word >> 25,
        OPERATIONS[(word >> 5 & 15) % len(OPERATIONS)],
        word >> 15 & MAX_RANKS - 1,
    )
