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
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.platform.torch_private.tensor_state import gradient_hooks
from shoal.trial.saved_objects import SavedObjects


class Untouched:
    """Save all that a call of `function` may change; put it back on `restore` and at the end.

    BatchNorm normalises with its running statistics meanwhile: that it mixes the samples of a
    batch is told elsewhere. TensorFloat-32 is off, for its rounding depends on the split. Hooks of
    gradients do not run, and nothing is printed.

    Args:
        models: the modules that the function calls.
        function: the user's function.
        with_modules: False leaves the modules out, where none of them is called.
    """

    def __init__(
        self, models: Sequence[nn.Module], function: Any, with_modules: bool = True
    ) -> None:
        self._models = list(models)
        self._function = function
        self._with_modules = with_modules
        self._stack = ExitStack()
        self._seed: int | None = None
        self._evaluated: tuple[type[nn.Module], ...] = (BatchNormBase,)

    def __enter__(self) -> Untouched:
        self._objects = SavedObjects()
        if self._with_modules:
            for model in self._models:
                self._objects.save(model)
        else:
            self._objects.skip(module for model in self._models for module in model.modules())
        self._objects.save(self._function)
        self._generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._devices = self._states_of_devices()
        self._parameters = [p for model in self._models for p in model.parameters()]
        self._grads = [parameter.grad for parameter in self._parameters]
        self._hooks = [dict(gradient_hooks(parameter)) for parameter in self._parameters]
        self._tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
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
        for model in self._models if self._with_modules else ():
            for module in model.modules():
                if isinstance(module, self._evaluated):
                    module.training = False

    def _put_back(self) -> None:
        self._objects.restore()
        torch.set_rng_state(self._generators[0])
        for device, state in self._devices:
            torch.cuda.set_rng_state(state, device)
        if self._seed is None:
            random.setstate(self._generators[1])
            np.random.set_state(self._generators[2])
        else:
            random.seed(self._seed)
            np.random.seed(self._seed)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad

    def _states_of_devices(self) -> list[tuple[torch.device, Tensor]]:
        devices = {
            parameter.device
            for model in self._models
            for parameter in model.parameters()
            if parameter.device.type == "cuda"
        }
        return [(device, torch.cuda.get_rng_state(device)) for device in devices]
