"""The user's line that led to a call: the innermost one outside of every library."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

_SHOAL = f"{Path(__file__).parents[2]}/"
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")


def user_line() -> str:
    """Return "train.py:41"; "" where no line of the user's led here, as in autograd's threads."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_library(file: str) -> bool:
    return (
        file.startswith((_SHOAL, _STANDARD_LIBRARY, "<"))
        or _INSTALLED[0] in file
        or _INSTALLED[1] in file
    )
