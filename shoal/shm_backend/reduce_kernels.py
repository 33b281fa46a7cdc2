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
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch cannot add these


def reduce_into(out: Tensor, terms: Sequence[Tensor], operation: str) -> None:
    """Reduce `terms` into `out` in their order; "avg" divides the sum by their number.

    Args:
        out: as long as each term. It may be one of the first two terms, but no later one: the first
            addition overwrites it.
        terms: two or more.
    """
    combine = COMBINE[operation]
    combine(terms[0], terms[1], out=out)
    for term in terms[2:]:
        combine(out, term, out=out)
    if operation == "avg":
        out.div_(len(terms))


@cache
def can_reduce(dtype: torch.dtype, operation: str) -> bool:
    """Return True if `reduce_into` supports this dtype and operation.

    Gloo gets the other calls. It supports some of them and raises an error for the rest.
    """
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    if operation not in COMBINE or is_float8 or dtype in _UNSIGNED:
        return False
    if operation == "avg":
        return dtype.is_floating_point or dtype.is_complex
    if operation in ("min", "max"):
        return not dtype.is_complex
    return operation in ("sum", "product") or not (dtype.is_floating_point or dtype.is_complex)
