"""The buffers of a model as they were before it was tried: values, and which tensor stands
under which name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.platform.torch_private.module_state import own_buffers


class Buffers:
    """Remembers them when it is made."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, tensor, tensor.clone())
            for module in model.modules()
            for name, tensor in own_buffers(module).items()
            if tensor is not None
        ]

    def mutated(self) -> set[int]:
        """Ids of those that have another value now, or another tensor in their place."""
        return {
            id(tensor)
            for module, name, tensor, value in self._kept
            if own_buffers(module).get(name) is not tensor or not torch.equal(tensor, value)
        }

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for module, name, tensor, value in self._kept:
                own_buffers(module)[name] = tensor
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
