"""Waits of the forward pass for new values: each unit waits only for the values that it reads.

pull      layer 1 ──┐   layer 2 ──┐   layer 3 ──┐       in the order of the forward pass
forward   waits     1   waits     2   waits     3

A step may also read parameters beside the units' calls: a penalty on weights, a matrix that is used
by a function. In a step, such a parameter has a class of its own until its values are there, whose
`__torch_function__` waits for them at the first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.platform.torch_private.module_state import is_compiled
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.strategies.wrap_units import units, user_models


class ValueWaits:
    """Waits for the values of the last step, wherever the forward pass first reads them.

    Args:
        module: the model, or a container of several that has no forward function.
        parts_of: parameter name -> numbers of its partitions.
    """

    def __init__(
        self,
        module: nn.Module,
        client: WorkerClient,
        flat: FlatParams,
        parts_of: Mapping[str, Sequence[int]],
    ) -> None:
        self._module = module
        self._client = client
        self._flat = flat
        self._parts_of = parts_of
        self._names = {id(parameter): name for name, parameter in flat.parameters.items()}
        self._classes: dict[str, type] = {}  # of parameters that wait for a first read: their own
        self._waiting_classes: dict[type, type] = {}

    def register_hooks(self) -> None:
        """Let each wrap unit, and each model, wait when it is called."""
        models = user_models(self._module)
        remaining = set(self._flat.parameters)
        for unit in [*reversed(units(self._module).values()), *models]:  # inner units first
            inside = [self._names[id(p)] for p in unit.parameters() if id(p) in self._names]
            inside = [name for name in inside if name in remaining]
            remaining -= set(inside)
            hook: Any = torch.compiler.disable(lambda *_, names=inside: self.arrive(names))
            hook.__module__ = __name__  # a guard looks for hooks of Shoal's when a model is saved
            unit.register_forward_pre_hook(hook)

    @contextmanager
    def at_first_read(self) -> Iterator[None]:
        """Let every use of a parameter in this context wait for its values."""
        if is_compiled(self._module):
            self.arrive(self._flat.parameters)  # compiled code would see two kinds of parameters
        else:
            for name, parameter in self._flat.parameters.items():
                self._classes[name] = type(parameter)
                _become(parameter, self._waiting_class(type(parameter)))
        try:
            yield
        finally:
            self._end_wait([*self._classes])

    def arrive(self, names: Iterable[str]) -> None:
        """Wait for the values of some parameters."""
        names = [*names]
        self._end_wait(names)
        self._client.wait(sorted({number for name in names for number in self._parts_of[name]}))
        self._flat.copy_to_params(names)

    def _end_wait(self, names: Iterable[str]) -> None:
        """Give parameters the class back that they had."""
        for name in names:
            own_class = self._classes.pop(name, None)
            if own_class is not None:
                _become(self._flat.parameters[name], own_class)

    def _waiting_class(self, own_class: type) -> type:
        """Return a subclass of a parameter's class that waits when a function is to use it."""
        if own_class not in self._waiting_classes:

            def wait_first(
                _class: type, function: Any, _types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                leaves = tree_leaves((args, kwargs or {}))
                used = [self._names.get(id(leaf)) for leaf in leaves]
                self.arrive(dict.fromkeys(name for name in used if name in self._classes))
                return function(*args, **(kwargs or {}))

            attributes: Any = {"__torch_function__": classmethod(wait_first)}
            self._waiting_classes[own_class] = type("WaitingParameter", (own_class,), attributes)
        return self._waiting_classes[own_class]


def _become(parameter: Any, kind: type) -> None:
    """Change the class of a parameter: the object stays, and all who hold it."""
    parameter.__class__ = kind
