"""Models that compute in float64 for a while, where float32 cannot tell rounding from an error.

    module._parameters["weight"]      float32  ──>  its float64 copy, and back at the end
    a weight that a closure holds     replaced where a function of torch is given it

The parameters themselves stay as they are. Another dtype in `parameter.data` would make autograd
forget the node that accumulates its gradient, and with it the hooks of DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.data.tree_map import tree_map
from shoal.platform.torch_private.module_state import own_buffers, own_parameters


@contextmanager
def models_in_float64(models: Sequence[nn.Module]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Let parameters, buffers and new tensors be float64 inside.

    Yields a function: a parameter or buffer of the models -> its float64 copy; any other tensor
    -> itself.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    held = [
        (module, name, tensor)
        for module in modules
        for tensors in (own_parameters(module), own_buffers(module))
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_floating_point()
    ]
    copies = {id(tensor): _in_float64(tensor) for _, _, tensor in held}
    default = torch.get_default_dtype()

    def copy_of(tensor: Tensor) -> Tensor:
        return copies.get(id(tensor), tensor)

    try:
        for module, name, tensor in held:
            _replace(module, name, copy_of(tensor))
        torch.set_default_dtype(torch.float64)
        with _Float64Arguments(copy_of):
            yield copy_of
    finally:
        torch.set_default_dtype(default)
        for module, name, tensor in held:
            _replace(module, name, tensor)


class _Float64Arguments(TorchFunctionMode):
    """Gives functions of torch the float64 copy of a parameter or buffer, whoever holds it."""

    def __init__(self, copy_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._copy_of = copy_of

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*self._with_copies(args), **self._with_copies(dict(kwargs or {})))

    def _with_copies(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_of(value)
        # Exactly these types: a torch.Size has no tensors.
        if type(value) in (tuple, list, dict):
            return tree_map(value, self._with_copies)
        return value


def _in_float64(tensor: Tensor) -> Tensor:
    copy = tensor.detach().double()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy)
        copy.__dict__.update(tensor.__dict__)  # marks that a script has put on its weights
    return copy.requires_grad_(tensor.requires_grad)


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        setattr(module, name, tensor)
        return
    own: dict[str, Any] = own_parameters(module)
    tensors = own if name in own else own_buffers(module)
    tensors[name] = tensor
