"""Weights that servers own: whole whenever a script reads them, and not written unnoticed.

      read after optimizer.step()            waits until the values of that step are there
      p.clamp_(), nn.init, load_state_dict   change the version counter of the parameter
      p.data = t, vector_to_parameters       change its memory
      p.data.add_()                          would change neither: `.data` of such a parameter is
                                             `.detach()`, which shares the counter

A change between steps is an error, unless it was made within `run.edit()`. Only a write through
NumPy's view of a parameter is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.subclasses import (
    DISABLED_TORCH_FUNCTION,
    DisableTorchFunctionSubclass,
)
from shoal.platform.torch_private.tensor_state import version
from shoal.run.guards.absent_values import READABLE
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook

_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
_NO_WAIT = READABLE | {_GRAD.__set__, _GRAD.__delete__}


class RemoteParameter(nn.Parameter):
    """A parameter whose values come from servers: `.data` shares its version counter.

    A copy is a plain Parameter again.
    """

    __torch_function__ = DISABLED_TORCH_FUNCTION

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            values = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy


class ArrivingParameter(RemoteParameter):
    """A parameter whose values of the last step may not be there yet: any use waits for them."""

    watches: ClassVar[set[WeightWatch]] = set()
    """The watches of such parameters."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            if func not in _NO_WAIT:
                for watch in {*cls.watches}:
                    watch.wait()
            return func(*args, **(kwargs or {}))


class WeightWatch:
    """Notices reads and writes of parameters that servers own, until `undo` is closed.

    Args: guarded: prepared models whose parameters are all plain tensors.
    """

    def __init__(self, guarded: GuardedModels, undo: ExitStack) -> None:
        self._guarded = guarded
        self._parameters = [
            (name, parameter)
            for name, parameter in guarded.local_model.trainable_params.items()
            if type(parameter) is nn.Parameter
        ]
        self._arriving = False
        for _, parameter in self._parameters:
            _become(parameter, RemoteParameter)
            undo.callback(_become, parameter, nn.Parameter)
        for optimizer in guarded.optimizers:
            undo.callback(optimizer.register_step_post_hook(self._on_step).remove)
        for model in guarded.models.values():
            # A step has begun its passes already, and waits unit by unit.
            hook = ModuleHook(lambda *_: self.wait())
            undo.callback(model.register_forward_pre_hook(hook, prepend=True).remove)
        undo.callback(self.wait)
        self._known: list[tuple[int, int]] = []
        self.accept()

    def accept(self) -> None:
        """Take the present weights for those of the servers."""
        self._known = [_state(parameter) for _, parameter in self._parameters]

    def begin_passes(self) -> None:
        """Leave it to the passes to wait for the values that they read."""
        if self._arriving:
            self._arriving = False
            ArrivingParameter.watches.discard(self)
            for _, parameter in self._parameters:
                _become(parameter, RemoteParameter)

    def wait(self) -> None:
        """Wait until the values of the last step are there."""
        if self._arriving:
            self.begin_passes()
            self._guarded.local_model.strategy_state.wait()

    def check(self) -> None:
        """Raise UsageError if a weight was written since `accept`.

        It reads no values, so those of the last step may still be on their way.
        """
        with DisableTorchFunctionSubclass():
            states = [_state(parameter) for _, parameter in self._parameters]
        if states == self._known:
            return
        name = next(
            name
            for (name, _), now, known in zip(self._parameters, states, self._known, strict=True)
            if now != known
        )
        raise UsageError(
            f"{name} was written between two steps, noticed{call_site() or ' now'}; the servers "
            f"own it{self._guarded.under}, and their values would replace what was written. "
            "Write weights within `with run.edit():`, on all ranks."
        )

    def _on_step(self, *_: Any) -> None:
        self._arriving = True
        ArrivingParameter.watches.add(self)
        for _name, parameter in self._parameters:
            _become(parameter, ArrivingParameter)


def _become(parameter: Any, kind: type[nn.Parameter]) -> None:
    """Change the class of a parameter: the object stays, and all who hold it."""
    parameter.__class__ = kind


def _state(parameter: Tensor) -> tuple[int, int]:
    return version(parameter), parameter.data_ptr()
