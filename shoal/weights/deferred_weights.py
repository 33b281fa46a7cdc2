"""Give memory and values to the weights of a model that have none, as strategies need them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from shoal.comm.axis import Axis
from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.platform.torch_private.tensor_state import has_hooks
from shoal.weights.deferred_init import initial_values, is_initialized_later
from shoal.weights.weight_files import stored_values


class DeferredWeights:
    """The weights of a model that have no memory yet, by name.

    Args:
        root: the model, or the group of all models.
        device: of this rank.

    Raises: UsageError: a tensor has neither memory nor values to come.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._device = device
        tensors = (*root.named_parameters(), *root.named_buffers())
        self._names = {id(tensor): name for name, tensor in tensors if tensor.is_meta}
        self._alive = [t for _, t in tensors if t.is_meta]  # so that no id is used again
        lacking = [name for name, tensor in tensors if tensor.is_meta and not has_values(tensor)]
        if lacking:
            raise UsageError(
                f"prepare: {', '.join(lacking[:5])}{', ...' if len(lacking) > 5 else ''} of the "
                "model lie on the meta device, and nothing tells their values. Build the model in "
                "`with shoal.empty_weights():`, with its dtype, or give it weights: "
                "shoal.load_weights(model, path)."
            )

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor; those without memory on the device of this rank."""
        if not tensor.is_meta:
            return tensor
        stored = stored_values(tensor)
        values = initial_values(tensor) if stored is None else stored.read()
        return values.to(self._device, tensor.dtype)

    def fill(
        self, modules: Iterable[nn.Module], axis: Axis | None = None, keeps: bool = False
    ) -> None:
        """Give the tensors of modules memory and values.

        Args:
            modules: with all modules inside of them.
            axis: the ranks that hold the same tensors. The first of them makes the values, and
                sends them to the others: collective over the axis. None if each makes its own.
            keeps: the parameters stay the objects that they are, with new memory, for optimizers
                that are bound later. Else modules get new ones, which nobody else holds.
        """
        new: dict[int, Tensor] = {}  # tied tensors stay tied
        for module in (inner for outer in modules for inner in outer.modules()):
            for store in (own_parameters(module), own_buffers(module)):
                lacking = {
                    name: tensor
                    for name, tensor in store.items()
                    if tensor is not None and tensor.is_meta and id(tensor) in self._names
                }
                for name, tensor in lacking.items():
                    if id(tensor) not in new:
                        new[id(tensor)] = self._filled(tensor, axis)
                    if keeps:
                        swap_tensors(tensor, new[id(tensor)])
                    else:
                        # Through the module: an LSTM keeps a list of its weights besides.
                        setattr(module, name, new[id(tensor)])

    def _filled(self, tensor: Tensor, axis: Axis | None) -> Tensor:
        """Return a tensor with memory and values, in the place of one without."""
        if has_hooks(tensor):
            raise UsageError(
                f"prepare: {self._names[id(tensor)]} has a hook, and gets its memory just now, as "
                "another tensor. Register hooks after run.prepare."
            )
        if axis is None or axis.rank == 0:
            values = self.values(tensor)
        else:
            values = torch.empty_like(tensor, device=self._device)
        if axis is not None:
            axis.broadcast_tensor(values)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(values, tensor.requires_grad)
        return values


def deferred_weights(root: nn.Module, device: torch.device) -> DeferredWeights | None:
    """Return the weights of a model that have no memory yet; None if all have."""
    tensors = (*root.parameters(), *root.buffers())
    is_complete = not any(tensor.is_meta for tensor in tensors)
    return None if is_complete else DeferredWeights(root, device)


def has_values(tensor: Tensor) -> bool:
    """Return True for a tensor that has memory, or whose values are known to come."""
    return not tensor.is_meta or stored_values(tensor) is not None or is_initialized_later(tensor)
