"""What a traced graph takes for granted: modes, plain attributes and hooks of the modules that the
tracer looked into.

      self.scale = 0.5   y = x * self.scale     traced:  y = x * 0.5     self.scale = 0.4 comes too late

Modules that stay whole are called as they are, so whatever happens to them counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch import nn

from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import HOOKS

PLAIN = (bool, int, float, complex, str, tuple, type(None))


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with each call of a module."""
    return any(getattr(module, kind, None) for kind in HOOKS)


class Constants:
    """The modes and attributes that the modules of a model have when it is made.

    Args:
        inside: names of the modules that were looked into, the model itself among them.
        asking: those whose code asks for their mode.
    """

    def __init__(self, model: nn.Module, inside: Iterable[str], asking: Set[str]) -> None:
        self._model = model
        self._modules = {name: model.get_submodule(name) for name in sorted(inside)}
        # Of a model that is in evaluation mode, the graph for training was traced as after
        # model.train().
        self._trains = {name: self._modules[name].training or not model.training for name in asking}
        self._values = {name: _plain(module) for name, module in self._modules.items()}

    def refuse_changes(self) -> None:
        """Raise UsageError where one of them is another now."""
        for name, trains in self._trains.items():
            if self._modules[name].training != (trains and self._model.training):
                now, then = (
                    ("training", "evaluation")
                    if self._modules[name].training
                    else ("evaluation", "training")
                )
                raise UsageError(
                    f"pipeline: {name} is in {now} mode, and its stages were made for {then} mode: "
                    "its code asks for "
                    "self.training, which is settled in run.prepare. Put it into its mode before "
                    "that, and let "
                    "model.train() leave it there; or have modules such as nn.Dropout do what "
                    "depends on the mode."
                )
        for name, module in self._modules.items():
            if name and has_hooks(module):
                raise UsageError(
                    f"pipeline: {name} has hooks now, and is not called as a whole. Register them "
                    "before run.prepare."
                )
            for key, then_value in self._values[name].items():
                value = vars(module).get(key, then_value)
                if not _same(then_value, value):
                    path = f"{name}.{key}" if name else key
                    raise UsageError(
                        f"pipeline: {path} was {then_value!r} in run.prepare and is {value!r} now, "
                        "of which the stages "
                        "that were made then do not hear. Keep it in a buffer, and write into that "
                        "with fill_."
                    )


def _plain(module: nn.Module) -> dict[str, Any]:
    ours = vars(nn.Module())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in ours and isinstance(value, PLAIN)
    }


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
