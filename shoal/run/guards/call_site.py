"""The line of the user's script that led to a guard, for error messages."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
_WRAPPERS = ("contextlib.py", "functools.py", "threading.py", "/copy.py")
_GUARDS = f"{Path(__file__).parent}/"


def call_site() -> str:
    """Return ` (train.py:41)`, the innermost line outside of torch and Shoal; empty if unknown."""
    frame = _user_frame(sys._getframe(1))
    if frame is None:
        # Backward passes on a GPU run hooks in a thread of their own; the script waits in its main
        # thread.
        frame = _user_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def is_called_by_shoal() -> bool:
    """Return whether the innermost caller outside of torch and of the guards is Shoal itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_LIBRARIES[0], _GUARDS, "<")) and not file.endswith(_WRAPPERS):
            return file.startswith(_LIBRARIES[1])
        frame = frame.f_back
    return True


def is_called_outside(depth: int) -> bool:
    """Return whether the caller `depth` frames above this function's is neither torch nor Shoal."""
    file = sys._getframe(depth + 1).f_code.co_filename
    return not file.startswith((*_LIBRARIES, "<"))


def is_in_step(frame: FrameType | None, optimizer: Any) -> bool:
    """Return whether a frame belongs to a call of the optimizer's own `step`."""
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        file = frame.f_code.co_filename
        inside = file.startswith(_LIBRARIES) or file.startswith("<") or file.endswith(_WRAPPERS)
        if not inside:
            return frame
        frame = frame.f_back
    return None
