"""Needs of the models between steps: to be evaluated, tried, and applied again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


def plain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the models: nothing is to be done around it."""
    return function(*args, **kwargs)


def no_op() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class OutsideStep:
    """Needs of the models outside of training steps. The default needs nothing."""

    call: Callable[..., Any] = plain_call
    """Call (function, *args, **kwargs): the function may call the models, for example to evaluate
    them. Every rank of a collective forward pass must make the call.
    """
    reshard: Callable[[], None] = no_op
    """Free the parameters that a forward pass without a backward pass has gathered."""
    whole_models: Callable[[], AbstractContextManager[bool]] | None = None
    """Return a context in which this rank may run the models without the others; it yields False
    if it cannot. Collective. None if nothing is to be done for that, or nothing can be."""
    close: Callable[[], None] = no_op
    """Make the models what they were, before the strategies are applied again. Collective."""


NEEDS_NOTHING = OutsideStep()
"""The needs of models in one piece, on one rank."""
