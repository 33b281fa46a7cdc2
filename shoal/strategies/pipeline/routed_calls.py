"""Calls of a divided model outside of a step: users evaluate by calling their model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import replace_call
from shoal.strategies.pipeline.executor import PipelineExecutor


class RoutedForward:
    """A model's forward function that goes through all stages.

    A copy of the model gets one that refuses: this one would call the original.

    Args: forward: of the model.
    """

    def __init__(self, forward: Callable[..., Any], executor: PipelineExecutor) -> None:
        self._forward = forward
        self._executor = executor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward function. Collective over the pipeline outside of steps."""
        if self._executor.divided.units.is_watching:
            return self._forward(*args, **kwargs)
        return self._executor.evaluate(self._forward, *args, **kwargs)

    def __reduce__(self) -> tuple[type[CopiedForward], tuple[()]]:
        return CopiedForward, ()


class CopiedForward:
    """The forward function of a copy, which has the layers of one rank alone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "pipeline: this is a copy of a model of which the values of some layers are on another "
            "rank. Copy the model before the first step, and load run.weights() into the copy, on "
            "all ranks."
        )


def route_calls(model: nn.Module, executor: PipelineExecutor) -> None:
    """Let a call of the model outside of a step go through all stages.

    A model that the script has compiled runs as it is written from now on.
    """
    replace_call(model, None)
    vars(model)["forward"] = RoutedForward(model.forward, executor)
