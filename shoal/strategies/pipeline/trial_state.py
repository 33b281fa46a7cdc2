"""The modes and buffers of a model, saved before a trial and restored after it.

Tracing, checking and profiling run the user's model. They must leave it as they found it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.platform.torch_private.module_state import own_buffers


class SavedBuffers:
    """The buffers of a model at the time of this call: names, tensors and values."""

    def __init__(self, model: nn.Module) -> None:
        # (module, name, tensor, copy of its values)
        self._saved: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, tensor, tensor.clone())
            for module in model.modules()
            for name, tensor in own_buffers(module).items()
            if tensor is not None
        ]

    def mutated(self) -> set[int]:
        """Return the ids of the buffers whose values or tensors have changed."""
        return {
            id(tensor)
            for module, name, tensor, value in self._saved
            if own_buffers(module).get(name) is not tensor or not torch.equal(tensor, value)
        }

    def restore(self) -> None:
        """Put all tensors and values back."""
        with torch.no_grad():
            for module, name, tensor, value in self._saved:
                own_buffers(module)[name] = tensor
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put all modules into training or evaluation mode; restore the mode of each afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Give modules the modes that they have in a training step.

    A model in training mode stays as it is, with those of its modules that are in evaluation mode.
    A model in evaluation mode is put into training mode.
    """
    if model.training:
        yield
    else:
        with in_mode(model, True):
            yield
