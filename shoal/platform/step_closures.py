"""Functions that an optimizer calls when the gradients of its step are there, and not used yet.

optimizer.step()            function() ── update
optimizer.step(closure)     closure() ── function() ── update; LBFGS repeats this
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def call_before_update(optimizer: Optimizer, function: Callable[[], Any]) -> RemovableHandle:
    """Call `function` before each update of an optimizer, after a closure has made its gradients.

    Returns: a handle that ends it.
    """

    def before_step(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        is_positional = len(args) > 1  # behind the optimizer itself
        closure = args[1] if is_positional else kwargs.get("closure")
        if not callable(closure):
            function()
            return None

        def compute(*inputs: Any, **named_inputs: Any) -> Any:
            loss = closure(*inputs, **named_inputs)
            function()
            return loss

        if is_positional:
            return (args[0], compute, *args[2:]), kwargs
        return args, {**kwargs, "closure": compute}

    return optimizer.register_step_pre_hook(before_step)
