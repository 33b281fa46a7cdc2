from typing import Any

from torch import Tensor

VERSION: int

def are_finite(
    tensors: list[Tensor],
    others: list[Tensor],
    tensor_type: type,
    exchange: Any,
    max_bytes: int,
    /,
) -> bool: ...
def copy_finite(
    targets: list[Tensor],
    sources: list[Tensor],
    others: list[int],
    tensor_type: type,
    exchange: Any,
    max_bytes: int,
    /,
) -> bool: ...
