"""The state of a model, saved before a trial and restored after it.

Observing, measuring and trying run the user's model. They must leave it as they found it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.platform.torch_private.module_state import own_buffers

PLAIN_TYPES = (bool, int, float, complex, str, tuple, type(None))


class SavedState:
    """Buffers, gradients and plain attributes of a model at the time of this call."""

    def __init__(self, model: nn.Module) -> None:
        # (module, name, tensor, copy of its values)
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, tensor, tensor.clone())
            for module in model.modules()
            for name, tensor in own_buffers(module).items()
            if tensor is not None
        ]
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = [
            (module, {k: v for k, v in vars(module).items() if isinstance(v, PLAIN_TYPES)})
            for module in model.modules()
        ]
        for parameter in model.parameters():
            parameter.grad = None

    def mutated(self) -> set[int]:
        """Return the ids of the buffers whose values or tensors have changed."""
        return {
            id(tensor)
            for module, name, tensor, value in self._buffers
            if own_buffers(module).get(name) is not tensor or not torch.equal(tensor, value)
        }

    def restore(self) -> None:
        """Put all tensors, values and attributes back."""
        with torch.no_grad():
            for module, name, tensor, value in self._buffers:
                own_buffers(module)[name] = tensor
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, attributes in self._attributes:
            for name, value in attributes.items():
                if vars(module).get(name) is not value:
                    vars(module)[name] = value
