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
}
# The dtypes that torch adds.
REDUCIBLE = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


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
    if operation not in COMBINE or dtype not in REDUCIBLE:
        return False
    if operation == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return operation in ("sum", "product") or not dtype.is_complex
