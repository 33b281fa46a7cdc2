"""The one call of the model that the user's function makes, seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal.errors import StrategyRefused
from shoal.strategies.base import LocalBatch


class _Called(BaseException):
    """Ends the user's function at its call of the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args
        self.keywords = kwargs


@contextmanager
def replaced_forward(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward function of the model."""
    before = model.forward
    model.forward = function
    try:
        yield
    finally:
        model.forward = before


def call_arguments(model: nn.Module, batch: LocalBatch) -> tuple[Any, ...]:
    """Return the positional arguments with which `compute_loss` calls the model.

    Raises: StrategyRefused: it does not call the model, or calls it by keyword.
    """

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    with replaced_forward(model, stop):
        try:
            batch.compute_loss(*batch.args, **batch.kwargs)
        except _Called as call:
            if call.keywords:
                raise StrategyRefused(
                    "pipeline: the model is called by keyword, and its layers are traced by "
                    "position. Call model(x, ...) with positional arguments."
                ) from None
            return call.arguments
    raise StrategyRefused(
        "pipeline: compute_loss does not call the model. Call model(...) itself, not a method or a "
        "module inside of it."
    )
