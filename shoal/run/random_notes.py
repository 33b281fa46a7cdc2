"""The note of what draws random numbers in the first step, beyond the layers that are known.

A layer may draw in its `forward` (stochastic depth, noise, `F.dropout`), and so may the loss. Every
random operator of the first step is seen, and where it was called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shoal.data.draws import draws_numbers
from shoal.platform.torch_private.module_state import is_compiled
from shoal.platform.torch_private.subclasses import DispatchMode
from shoal.platform.torch_private.tensor_state import schema_of
from shoal.strategies.wrap_units import has_dropout

LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
"""Folders of files that are not the user's."""


class RandomOperators(DispatchMode):
    """Notes which random operators run inside, and in which module or line.

    Args: module: the prepared model, or the group of them.

    Attributes: places: descriptions of the places that draw, each once, in order.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, None] = {}
        self._names = {id(inner): name for name, inner in module.named_modules() if name}
        self._known = {id(inner) for inner in module.modules() if has_dropout(inner)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_numbers(func, args, kwargs or {}):
            operator = schema_of(func).name.partition("::")[2].removesuffix("_")
            self._note(operator, sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, frame: FrameType | None) -> None:
        """Remember the innermost module and the innermost line of the user's own."""
        name, line = "", ""
        while frame is not None and not (name and line):
            holder = frame.f_locals.get("self")
            if isinstance(holder, nn.Module):
                if id(holder) in self._known:
                    return  # the startup summary has named it
                name = name or self._names.get(id(holder), "")
            file = frame.f_code.co_filename
            if not line and not file.startswith((*LIBRARIES, "<")):
                line = f"{file.rpartition('/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        place = " at ".join(part for part in (name, line) if part)
        self.places[f"{operator} in {place}" if place else operator] = None


@contextmanager
def noting_draws(module: nn.Module, announce: Callable[[str], None]) -> Iterator[None]:
    """Announce what draws random numbers inside, with one note; nothing for a compiled model."""
    if any(map(is_compiled, module.modules())):
        yield
        return
    with RandomOperators(module) as operators:
        yield
    if operators.places:
        first, *others = operators.places
        more = f" and {len(others)} more" if others else ""
        announce(
            f"note: the first step draws random numbers ({first}{more}): a stream of its own on "
            'every rank, so same law, other numbers. draws="global" draws those of one device.'
        )
