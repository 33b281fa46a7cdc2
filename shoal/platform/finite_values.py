"""Looks for NaN and infinities at the speed of memory (finite_values.c), with a compiler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.platform import _finite_values as compiled
else:
    try:
        from shoal.platform import _finite_values as compiled
    except ImportError:  # there was no compiler when Shoal was installed
        compiled = None

VERSION = 3
"""Version of the compiled module's arguments: raise it here and in finite_values.c."""
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's functions that tell where the values of a tensor lie; None if torch is too old."""
ONE_THREAD_BYTES = 4 << 20
"""Largest tensor that is not left to torch's threads, where there are several."""
ANY_BYTES = 1 << 62


def has_compiled_look() -> bool:
    """Return True if the compiled module is there. SHOAL_COMPILED=0 disables it."""
    is_usable = compiled is not None and compiled.VERSION == VERSION and EXCHANGE is not None
    return is_usable and os.environ.get("SHOAL_COMPILED") != "0"


_is_usable = has_compiled_look()


def first_look(tensors: list[Tensor]) -> tuple[bool, list[Tensor]]:
    """Look at all values that lie contiguous in the CPU's memory, once.

    Returns: False if one is not finite, and the tensors that were not looked at.
    """
    if not _is_usable:
        return True, tensors
    others: list[Tensor] = []
    finite = compiled.are_finite(tensors, others, Tensor, EXCHANGE, _max_bytes())
    return finite, others


def first_copy(targets: list[Tensor], sources: list[Tensor]) -> tuple[bool, Sequence[int]]:
    """Copy sources to targets of the same shapes, where both lie contiguous in the CPU's memory.

    A copy and a look at once read the memory once.

    Returns: False if a value that was copied is not finite, and the indices of the pairs that were
        not copied.
    """
    if not _is_usable:
        return True, range(len(sources))
    others: list[int] = []
    finite = compiled.copy_finite(targets, sources, others, Tensor, EXCHANGE, _max_bytes())
    return finite, others


def _max_bytes() -> int:
    return ANY_BYTES if torch.get_num_threads() == 1 else ONE_THREAD_BYTES
