"""How numbers of several ranks become one: always from rank 0 upwards, so that sums are the
same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Combine = Callable[..., Any]

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


def reduce_into(out: Tensor, parts: Sequence[Tensor], operation: str) -> None:
    """`out` = parts[0] + parts[1] + ... in this order; the mean of them for "avg".

    Args: out: as long as each of `parts`; it may be none of them but the first two.
    """
    combine = COMBINE[operation]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if operation == "avg":
        out.div_(len(parts))


@cache
def can_reduce(dtype: torch.dtype, operation: str) -> bool:
    """Whether this is done here; what is not, Gloo does or refuses."""
    if (
        operation not in COMBINE
        or (dtype.itemsize == 1 and dtype.is_floating_point)
        or dtype in _UNSIGNED
    ):
        return False
    if operation == "avg":
        return dtype.is_floating_point or dtype.is_complex
    if operation in ("min", "max"):
        return not dtype.is_complex
    return operation in ("sum", "product") or not (dtype.is_floating_point or dtype.is_complex)


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch adds none of these
