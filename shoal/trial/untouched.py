"""Calls of a user's function that leave no trace: generators, models, gradients, the script.

with Untouched(models, compute_loss) as state:
    compute_loss(...)
    state.restore()          each pass begins where the training step would
    compute_loss(...)

Counters, meters, lists, tensors and generators of the script are found through the function
(`reached.py`).
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.data.own_generators import GENERATOR_KINDS, generator_state, restore_generator
from shoal.data.seeds import GeneratorStates, preserve_rng_state
from shoal.data.tree_map import tensors_in
from shoal.platform.torch_private.module_state import BatchNormBase, DropoutBase
from shoal.platform.torch_private.tensor_state import gradient_hooks, version
from shoal.strategies.module_snapshot import (
    CONTAINERS,
    ModelSnapshot,
    refill,
    trial_running,
    uncompiled,
)
from shoal.strategies.pipeline.absent import AbsentTensor
from shoal.trial.loss_verdict import CannotTry
from shoal.trial.reached import LARGEST_COPY, Place, is_of_library, reached, variables_of

EVALUATED = (BatchNormBase, DropoutBase, nn.RNNBase, nn.MultiheadAttention)
"""Classes of layers that a trial evaluates."""


class SavedObjects:
    """Objects and what they held at the time of `save`; `restore` may be called many times."""

    def __init__(self) -> None:
        self._restores: list[Callable[[], bool | None]] = []
        self._seen: dict[int, Any] = {}

    def skip(self, values: Iterable[Any]) -> None:
        """Leave out objects that `save` would find."""
        self._seen.update((id(value), value) for value in values)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that were found."""
        return [value for value in self._seen.values() if isinstance(value, Tensor)]

    def restore(self) -> bool:
        """Put back what has changed since `save`; return True if anything had.

        Of arrays and generators it is not known whether they have.
        """
        with torch.no_grad():
            changes = [restore() for restore in self._restores]
        return any(changes)

    def save(self, value: Any) -> None:
        """Save an object, and what it holds.

        Raises: CannotTry: an iterator, which cannot be turned back.
        """
        for place in reached(value, self._seen):
            self._save_one(place.value)

    def _save_one(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.numel() <= LARGEST_COPY:
                self.save_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.size <= LARGEST_COPY and value.flags.writeable:
                self._restores.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, GENERATOR_KINDS):
            self._restores.append(partial(restore_generator, value, generator_state(value)))
        elif isinstance(value, FunctionType):
            if not is_of_library(value.__code__):
                self._restores += [partial(_put_back, place) for place in variables_of(value)]
        elif isinstance(value, CONTAINERS):
            self._restores.append(partial(refill, value, value.copy()))
        elif hasattr(value, "__next__"):
            raise CannotTry(f"a {type(value).__name__}, which cannot be read again")
        elif hasattr(value, "__dict__"):
            self._restores.append(partial(refill, vars(value), dict(vars(value))))

    def save_tensor(self, tensor: Tensor) -> None:
        """Save the values of a tensor, if it has any of its own."""
        # An absent tensor, which a hook may have kept, has no memory.
        if isinstance(tensor, (DTensor, AbsentTensor)) or tensor.is_inference():
            return
        values, before = tensor.detach().clone(), version(tensor)

        def restore() -> bool:
            nonlocal before
            has_changed = version(tensor) != before
            if has_changed:
                tensor.detach().copy_(values)
                before = version(tensor)
            return has_changed

        self._restores.append(restore)


def _put_back(place: Place) -> bool:
    """Put a variable back; return True if it had changed."""
    has_changed = place.read() is not place.value
    if has_changed and place.write is not None:
        place.write(place.value)
    return has_changed


def devices_of(models: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices on which the parameters of models lie."""
    return {parameter.device for model in models for parameter in model.parameters()}


@contextmanager
def leaving_no_trace(models: Sequence[nn.Module], function: Any, batch: Any) -> Iterator[bool]:
    """Put models, the script, its batch and generators back after passes that run as those of a
    step.

    Yields False if the script cannot be put back, as one that reads from an iterator.
    """
    snapshots = [ModelSnapshot(model) for model in models]
    objects, can_repeat = SavedObjects(), True
    objects.skip(module for model in models for module in model.modules())
    for tensor in tensors_in(batch):
        objects.save_tensor(tensor)
    try:
        objects.save(function)
    except CannotTry:
        can_repeat = False
    try:
        with redirect_stdout(io.StringIO()), preserve_rng_state(devices_of(models)):
            yield can_repeat
    finally:
        objects.restore()
        for state in reversed(snapshots):
            state.restore()


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the hooks of strategies and users from gradients that are none of a step."""
    with ExitStack() as stack:
        for table in map(gradient_hooks, tensors):
            stack.callback(table.update, dict(table))
            table.clear()
        yield


class Untouched:
    """Save all that a call of `function` may change; put it back on `restore` and at the end.

    Layers of `EVALUATED` are in evaluation mode meanwhile: that BatchNorm mixes the samples of a
    batch is told elsewhere, and masks of dropout are no matter of samples. TensorFloat-32 is off,
    for its rounding depends on the split. Nothing is compiled. Hooks of gradients do not run, and
    nothing is printed.

    Args:
        models: the modules that the function calls.
        function: the user's function.

    Attributes:
        parameters: of the models.
        script_was_changed: a pass has changed what the function reaches beyond the models.
    """

    def __init__(self, models: Sequence[nn.Module], function: Any) -> None:
        self._models = list(models)
        self.parameters = [p for model in models for p in model.parameters()]
        self._function = function
        self._stack = ExitStack()
        self._seed: int | None = None
        self.script_was_changed = False

    def __enter__(self) -> Untouched:
        self._layers, self._script = SavedObjects(), SavedObjects()
        for model in self._models:
            self._layers.save(model)
            self._script.skip(model.modules())
        self._script.skip(self._layers.tensors())
        self._script.save(self._function)
        self._generators = GeneratorStates(devices_of(self._models))
        self._gradients = [p.grad for p in self.parameters]
        self._stack.enter_context(trial_running())
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(redirect_stdout(io.StringIO()))
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
        for backend in backends:
            self._stack.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
            backend.allow_tf32 = False
        self._stack.enter_context(without_hooks(self.parameters))
        self._prepare_modules()
        return self

    def __exit__(self, *_: object) -> None:
        self._seed = None
        self._put_back()
        self._stack.close()

    def restore(self, script: bool = True) -> None:
        """Put everything back, for the next pass.

        Args: script: False to leave what passes have changed beyond the models.
        """
        self._put_back(script)
        self._prepare_modules()

    def reseed(self, seed: int | None) -> None:
        """Let the following passes find Python's and NumPy's generators in another state.

        Args: seed: None for the state of the beginning.
        """
        self._seed = seed

    def _prepare_modules(self) -> None:
        for model in self._models:
            for module in model.modules():
                if isinstance(module, EVALUATED):
                    module.training = False

    def _put_back(self, script: bool = True) -> None:
        if script:
            self.script_was_changed |= self._script.restore()
        self._layers.restore()
        self._generators.restore()
        if self._seed is not None:
            random.seed(self._seed)
            np.random.seed(self._seed)
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
