"""The constants of a trace: modes, plain attributes and hooks of the modules that were inlined.

      code     self.scale = 0.5     y = x * self.scale
      trace                         y = x * 0.5
      later    self.scale = 0.4     has no effect on the trace, so it is refused

Modules that are one node of the graph are called as they are, so they may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch import nn

from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import HOOKS

PLAIN_TYPES = (bool, int, float, complex, str, tuple, type(None))


def has_hooks(module: nn.Module) -> bool:
    """Return whether any hook runs when the module is called."""
    return any(getattr(module, kind, None) for kind in HOOKS)


class Constants:
    """The modes and plain attributes of a model's inlined modules, at the time of this call.

    Args:
        inlined: names of the modules that the tracer looked into; "" is the model itself.
        mode_readers: names of those whose code reads `self.training`.
    """

    def __init__(self, model: nn.Module, inlined: Iterable[str], mode_readers: Set[str]) -> None:
        self._model = model
        self._modules = {name: model.get_submodule(name) for name in sorted(inlined)}
        # If the model is in evaluation mode, its training graph was traced as after model.train().
        self._trains = {
            name: self._modules[name].training or not model.training for name in mode_readers
        }
        self._values = {name: _plain_attributes(module) for name, module in self._modules.items()}

    def check_unchanged(self) -> None:
        """Raise UsageError if a mode, a hook or an attribute is not as it was."""
        for name, trains in self._trains.items():
            self._check_mode(name, trains)
        for name, module in self._modules.items():
            if name and has_hooks(module):
                raise UsageError(
                    f"pipeline: {name} has hooks now, and is not called as a whole. Register them "
                    "before run.prepare."
                )
            self._check_attributes(name, module)

    def _check_mode(self, name: str, trains: bool) -> None:
        """Args: trains: the module is in training mode whenever the model is."""
        training = self._modules[name].training
        if training == (trains and self._model.training):
            return
        present, expected = ("training", "evaluation") if training else ("evaluation", "training")
        raise UsageError(
            f"pipeline: {name} is in {present} mode, and its stages were made for {expected} mode: "
            "its code asks for self.training, which is settled in run.prepare. Put it into its "
            "mode before that, and let model.train() leave it there; or have modules such as "
            "nn.Dropout do what depends on the mode."
        )

    def _check_attributes(self, name: str, module: nn.Module) -> None:
        for key, old in self._values[name].items():
            value = vars(module).get(key, old)
            if not _is_same(old, value):
                path = f"{name}.{key}" if name else key
                raise UsageError(
                    f"pipeline: {path} was {old!r} in run.prepare and is {value!r} now, "
                    "of which the stages that were made then do not hear. Keep it in a buffer, "
                    "and write into that with fill_."
                )


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the module's attributes of plain types, without those that every module has."""
    inherited = vars(nn.Module())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in inherited and isinstance(value, PLAIN_TYPES)
    }


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
