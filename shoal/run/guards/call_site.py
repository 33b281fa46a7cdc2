"""The line of the user's script that led to a guard, for error messages."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
_WRAPPERS = ("contextlib.py", "functools.py", "threading.py")
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
        if not file.startswith((_LIBRARIES[0], _GUARDS, "<")) and not file.endswith(
            (*_WRAPPERS, "copy.py")
        ):
            return file.startswith(_LIBRARIES[1])
        frame = frame.f_back
    return True


def is_called_outside(depth: int) -> bool:
    """Return whether the caller `depth` frames above this function's is neither torch nor Shoal."""
    file = sys._getframe(depth + 1).f_code.co_filename
    return not file.startswith((*_LIBRARIES, "<"))


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        file = frame.f_code.co_filename
        inside = file.startswith(_LIBRARIES) or file.startswith("<") or file.endswith(_WRAPPERS)
        if not inside:
            return frame
        frame = frame.f_back
    return None
