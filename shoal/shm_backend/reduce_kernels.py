"""Element-wise reductions over ranks, always from rank 0 upwards.

The fixed order makes sums the same to the last bit in every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Combine = Callable[..., Any]

# "avg" is a sum that is divided at the end.
COMBINE: Mapping[str, Combine] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# torch adds none of these. Two's complement: signed integers of the same width have the same sums,
# products and bits.
_SIGNED: Mapping[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def reduce_into(out: Tensor, terms: Sequence[Tensor], operation: str) -> None:
    """Reduce `terms` into `out` in their order; "avg" divides the sum by their number.

    Args:
        out: as long as each term. It may be one of the first two terms, but no later one: the first
            addition overwrites it.
        terms: two or more.
    """
    if out.dtype in _SIGNED:
        _reduce_unsigned(out, terms, operation)
    elif _is_float8(out.dtype):
        # Added in float32, and rounded once.
        wide = terms[0].float()
        reduce_into(wide, [wide, *(term.float() for term in terms[1:])], operation)
        out.copy_(wide)
    else:
        _reduce(out, terms, operation)


def _reduce(out: Tensor, terms: Sequence[Tensor], operation: str) -> None:
    combine = COMBINE[operation]
    combine(terms[0], terms[1], out=out)
    for term in terms[2:]:
        combine(out, term, out=out)
    if operation == "avg":
        out.div_(len(terms))


def _reduce_unsigned(out: Tensor, terms: Sequence[Tensor], operation: str) -> None:
    signed = _SIGNED[out.dtype]
    bits = [term.view(signed) for term in terms]
    if operation not in ("min", "max"):
        _reduce(out.view(signed), bits, operation)
        return
    # With the highest bit flipped, signed integers are in the order of the unsigned ones.
    highest = torch.iinfo(signed).min
    flipped = [term ^ highest for term in bits]
    _reduce(flipped[0], flipped, operation)
    out.view(signed).copy_(flipped[0] ^ highest)


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


@cache
def can_reduce(dtype: torch.dtype, operation: str) -> bool:
    """Return True if `reduce_into` supports this dtype and operation.

    Gloo gets the other calls. It supports some of them and raises an error for the rest.
    """
    if operation not in COMBINE:
        return False
    if operation == "avg":
        return dtype.is_floating_point or dtype.is_complex
    if operation in ("min", "max"):
        return not dtype.is_complex
    return operation in ("sum", "product") or not (dtype.is_floating_point or dtype.is_complex)
