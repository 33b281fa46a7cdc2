"""The line of a script that has called an operator of torch, or a guard; and who has called it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_PYTHON = f"{Path(contextlib.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
COMPILER = (f"{_TORCH}_dynamo/", f"{_TORCH}_compile.py")
"""Files of torch.compile, whose functions call others at a graph break."""
_DISTRIBUTED = f"{_TORCH}distributed/"
_SHARDING = (f"{_DISTRIBUTED}fsdp/", f"{_DISTRIBUTED}tensor/")
"""Files whose hooks and operators of shards send by themselves, in lines of the script."""
_SHOAL = f"{Path(__file__).parents[1]}/"
_GUARDS = f"{_SHOAL}run/guards/"


def caller(depth: int = 1) -> FrameType:
    """Return the frame `depth` calls above the function that asks; no other file asks Python."""
    return sys._getframe(depth + 1)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, and each that has called the one before."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def calling_line(frame: FrameType | None, by_distributed: bool = False) -> str:
    """Return `train.py:41`, the innermost line from `frame` on that is not torch's.

    Empty where Shoal has called, or `torch.distributed`, which shards parameters for it. A mode of
    Shoal's that passes a function of the script's on has not called it.

    Args: by_distributed: the call is one of `torch.distributed`, which the script may have called.
    """
    ours = (_SHOAL, *(_SHARDING if by_distributed else (_DISTRIBUTED,)))
    for each in _outwards(frame):
        file = each.f_code.co_filename
        if file.startswith(ours):
            if each.f_code.co_name != "__torch_function__":
                return ""
        elif not file.startswith((_TORCH, "<")):
            return f"{Path(file).name}:{each.f_lineno}"
    return ""


def script_frame(frame: FrameType | None, with_packages: bool = True) -> FrameType | None:
    """Return the innermost frame, from `frame` on, of the script; None without."""
    for each in _outwards(frame):
        file = each.f_code.co_filename
        is_counted = with_packages or "-packages/" not in file
        if is_counted and not file.startswith((_SHOAL, _TORCH, _PYTHON, "<")):
            return each
    return None


def script_line(frame: FrameType | None, with_packages: bool = True) -> str:
    """Return `train.py:41`, the innermost line from `frame` on of the script; empty without."""
    own = script_frame(frame, with_packages)
    return "" if own is None else f"{Path(own.f_code.co_filename).name}:{own.f_lineno}"


def is_called_by_script(frame: FrameType | None) -> bool:
    """Return True if a function of Python's library, or of NumPy, was called by the script."""
    for each in _outwards(frame):
        file = each.f_code.co_filename
        if "-packages/numpy/" not in file:
            if "-packages/" in file or file.startswith(_SHOAL):
                return False
            if not file.startswith((_PYTHON, "<")):
                return True
    return False


def is_called_from(files: str | tuple[str, ...], frame: FrameType | None) -> bool:
    """Return True if a frame, from `frame` on, is of a file whose path begins with one of these."""
    return any(each.f_code.co_filename.startswith(files) for each in _outwards(frame))


def call_site() -> str:
    """Return ` (train.py:41)`, the innermost line of the script, for messages; empty if unknown."""
    # Backward passes on a GPU run hooks in a thread of their own; the script waits in its main one.
    waiting = sys._current_frames().get(threading.main_thread().ident or 0)
    line = script_line(caller()) or script_line(waiting)
    return f" ({line})" if line else ""


def is_called_by_shoal() -> bool:
    """Return whether the innermost caller outside of torch and of the guards is Shoal itself."""
    files = (each.f_code.co_filename for each in _outwards(caller()))
    others = (file for file in files if not file.startswith((_TORCH, _GUARDS, _PYTHON, "<")))
    return next(others, _SHOAL).startswith(_SHOAL)


def is_called_outside(optimizer: Any = None) -> bool:
    """Return whether the caller of this function's caller is neither torch nor Shoal.

    Args: optimizer: whose own `step` may call, too.
    """
    frame = caller(2)
    if frame.f_code.co_filename.startswith((_TORCH, _SHOAL, "<")):
        return False
    return optimizer is None or not any(
        each.f_code.co_name == "step" and each.f_locals.get("self") is optimizer
        for each in _outwards(frame)
    )
