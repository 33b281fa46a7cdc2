"""Random numbers that a loop draws by torch between a batch's coming and its step.

z = torch.randn(len(x), 64)            each data rank draws others: the law of one device, and
run.forward_backward(..., x, z)        not its numbers
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType
from typing import Any

import torch

from shoal.data.draws import draws_numbers
from shoal.platform.script_line import calling_line
from shoal.platform.torch_private.tensor_state import schema_of

_LOADERS = f"{Path(__file__).parents[1] / 'data'}/"


class LoopDraws:
    """Notes which operators draw, and where.

    Attributes: places: "randn at train.py:12", each once, in order.
    """

    def __init__(self) -> None:
        self.places: dict[str, None] = {}

    def see(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> None:
        """Note an operator that draws from a generator of torch's own.

        A loop that fetches ahead runs its data set meanwhile, whose numbers follow from the sample.
        """
        given = any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
        if given or not draws_numbers(func, args, kwargs) or _is_of_loader(caller):
            return
        line = calling_line(caller)
        if line:
            operator = schema_of(func).name.partition("::")[2].removesuffix("_")
            self.places[f"{operator} at {line}"] = None


def _is_of_loader(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LOADERS):
            return True
        frame = frame.f_back
    return False
