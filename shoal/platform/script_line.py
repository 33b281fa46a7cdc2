"""The line of a script that has called an operator of torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import FrameType

import torch

_PYTHON = f"{Path(contextlib.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_SHARDING = f"{_TORCH}distributed/"
_SHOAL = f"{Path(__file__).parents[1]}/"


def calling_line(frame: FrameType | None) -> str:
    """Return `train.py:41`, the innermost line from `frame` on that is not torch's.

    Empty where Shoal has called, or `torch.distributed`, which shards parameters for it. A mode of
    Shoal's that passes a function of the script's on has not called it.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((_SHOAL, _SHARDING)):
            if frame.f_code.co_name != "__torch_function__":
                return ""
        elif not file.startswith((_TORCH, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def script_line(frame: FrameType | None) -> str:
    """Return `train.py:41`, the innermost line from `frame` on of the script; empty without."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_SHOAL, _TORCH, _PYTHON, "<")):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
