"""The safetensors format, in which a rank writes its tensors: dtypes and the header.

    8 bytes    length of the header
    header     JSON: name -> dtype, shape, offsets behind the header; spaces up to ALIGNMENT
    numbers    of one tensor after the other, the widest dtypes first, so that each is aligned

A dtype that the format lacks, such as complex128, is stored as bytes (U8), which are one dimension
more. Source of the format: the safetensors project's description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

ALIGNMENT = 64
RESERVED_NAME = "__metadata__"
"""The key of the header that is no tensor."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes that all of its readers know."""


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return the format's dtype and shape of a tensor: bytes where the format lacks the dtype."""
    if dtype in NAMES:
        return NAMES[dtype], list(shape)
    return "U8", [*shape, dtype.itemsize]


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[str], int]:
    """Return the header of a file, the order in which the numbers follow, and the file's size.

    Args:
        tensors: dtype and shape by name.
        metadata: texts that readers get besides.

    Returns: the header with its length; names; and bytes.
    """
    entries: dict[str, Any] = {RESERVED_NAME: dict(metadata)}
    end = 0  # offsets in the header are counted from its end
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    for name in order:
        dtype, shape = tensors[name]
        stored_dtype, stored_shape = stored_as(dtype, shape)
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {
            "dtype": stored_dtype,
            "shape": stored_shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order, 8 + len(text) + end
