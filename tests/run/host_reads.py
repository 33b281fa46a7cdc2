"""Where a step reads numbers of tensors in Python: on a GPU each such read waits for the device."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import shoal

TORCH = str(Path(torch.__file__).parent)
PACKAGE = str(Path(shoal.__file__).parent)
READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.is_nonzero),
    *(torch.equal, Tensor.equal, torch.nonzero, torch.is_nonzero),
}
"""Functions whose result depends on a tensor's numbers, and that wait for them."""


class HostReads(TorchFunctionMode):
    """Counts reads of tensors' numbers that Shoal makes, and not torch or the test.

    Attributes: places: file and function -> how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            code = _caller().f_code
            if code.co_filename.startswith(PACKAGE):
                self.places[f"{Path(code.co_filename).name}:{code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> FrameType:
    """Return the frame that calls the function, beyond modes through which the call passes."""
    frame = sys._getframe(2)
    through_mode = frame.f_code.co_name == "__torch_function__"
    while through_mode and frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        through_mode = name == "__torch_function__" or frame.f_code.co_filename.startswith(TORCH)
    return frame
