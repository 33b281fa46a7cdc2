"""Functions whose calls are watched, or answered otherwise, while a script runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


def watch(stack: ExitStack, owner: Any, name: str, answer: Callable[..., Any]) -> None:
    """Let calls of `owner.name` be `answer(original, ...)`, until the stack is closed."""
    original = getattr(owner, name)

    @wraps(original)  # Fabric reads the signature of DataLoader.__init__
    def watched(*args: Any, **kwargs: Any) -> Any:
        return answer(original, *args, **kwargs)

    setattr(owner, name, watched)
    stack.callback(setattr, owner, name, original)
