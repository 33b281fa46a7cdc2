"""Parameters that a script has taken before `run.prepare`, such as a list for clipping.

params = [*model.parameters()]             whole parameters
model, optimizer = run.prepare(...)        a strategy puts shards in their places
clip_grad_norm_(params, 1.0)               torch asks the whole ones, which pass it on to the shards
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.platform.torch_private.pytree import tree_map


class FormerParameter(nn.Parameter):
    """A parameter in whose place another one is: what is done to it is done to that one."""

    now: nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_now, (args, kwargs or {}))
        return func(*args, **kwargs)


def _now(value: Any) -> Any:
    return value.now if isinstance(value, FormerParameter) else value


def pass_on(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> None:
    """Pass on what a script does to parameters that a strategy has replaced.

    Args: before, now: the parameters of a model by name, without and with the strategy.
    """
    for name, parameter in before.items():
        successor = now.get(name, parameter)
        if successor is not parameter and type(parameter) is nn.Parameter:
            parameter.__class__ = FormerParameter
            parameter.now = successor  # type: ignore[attr-defined]
