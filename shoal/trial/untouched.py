"""Calls of a user's function that leave no trace: generators, models, gradients, the script.

with Untouched(models, compute_loss) as state:
    compute_loss(...)
    state.restore()          each pass begins where the training step would
    compute_loss(...)
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.data.seeds import GeneratorStates, preserve_rng_state
from shoal.data.tree_map import tensors_in
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.platform.torch_private.tensor_state import gradient_hooks, version
from shoal.strategies.module_snapshot import ModelSnapshot, trial_running, uncompiled
from shoal.trial.loss_verdict import CannotTry
from shoal.trial.saved_objects import SavedObjects


def devices_of(models: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices on which the parameters of models lie."""
    return {parameter.device for model in models for parameter in model.parameters()}


@contextmanager
def leaving_no_trace(models: Sequence[nn.Module], function: Any, batch: Any) -> Iterator[bool]:
    """Put models, the script, its batch and generators back after passes that run as those of a
    step.

    Yields False if the script cannot be put back, as one that reads from an iterator.
    """
    given = [
        (tensor, tensor.detach().clone(), version(tensor))
        for tensor in tensors_in(batch)
        if not tensor.is_inference()
    ]
    snapshots = [ModelSnapshot(model) for model in models]
    objects, can_repeat = SavedObjects(), True
    objects.skip(module for model in models for module in model.modules())
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
        for tensor, values, before in given:
            if version(tensor) != before:
                tensor.detach().copy_(values)


class Untouched:
    """Save all that a call of `function` may change; put it back on `restore` and at the end.

    BatchNorm normalises with its running statistics meanwhile: that it mixes the samples of a
    batch is told elsewhere. TensorFloat-32 is off, for its rounding depends on the split. Nothing
    is compiled. Hooks of gradients do not run, and nothing is printed.

    Args:
        models: the modules that the function calls.
        function: the user's function.
    """

    def __init__(self, models: Sequence[nn.Module], function: Any) -> None:
        self._models = list(models)
        self._function = function
        self._stack = ExitStack()
        self._seed: int | None = None
        self._evaluated: tuple[type[nn.Module], ...] = (BatchNormBase,)

    def __enter__(self) -> Untouched:
        self._objects = SavedObjects()
        for model in self._models:
            self._objects.save(model)
        self._objects.save(self._function)
        self._generators = GeneratorStates(devices_of(self._models))
        self._parameters = [p for model in self._models for p in model.parameters()]
        self._grads = [parameter.grad for parameter in self._parameters]
        self._hooks = [dict(gradient_hooks(parameter)) for parameter in self._parameters]
        self._tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        self._stack.enter_context(trial_running())
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(redirect_stdout(io.StringIO()))
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        for parameter in self._parameters:
            gradient_hooks(parameter).clear()
        self._prepare_modules()
        return self

    def __exit__(self, *_: object) -> None:
        self._seed = None
        self._put_back()
        for parameter, hooks in zip(self._parameters, self._hooks, strict=True):
            gradient_hooks(parameter).update(hooks)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self._tf32
        self._stack.close()

    def restore(self) -> None:
        """Put everything back, for the next pass."""
        self._put_back()
        self._prepare_modules()

    def reseed(self, seed: int | None) -> None:
        """Let the following passes find Python's and NumPy's generators in another state.

        Args: seed: None for the state of the beginning.
        """
        self._seed = seed

    def stop_dropout(self, kinds: tuple[type[nn.Module], ...]) -> None:
        """Evaluate modules of these classes too in all following passes."""
        self._evaluated = (BatchNormBase, *kinds)

    def _prepare_modules(self) -> None:
        for model in self._models:
            for module in model.modules():
                if isinstance(module, self._evaluated):
                    module.training = False

    def _put_back(self) -> None:
        self._objects.restore()
        self._generators.restore()
        if self._seed is not None:
            random.seed(self._seed)
            np.random.seed(self._seed)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad
