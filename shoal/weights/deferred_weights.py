"""Give memory and values to the weights of a model that have none, as strategies need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from shoal.comm.axis import Axis
from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.platform.torch_private.tensor_state import has_hooks
from shoal.weights.deferred_init import EmptyTensor


class DeferredWeights:
    """The weights of a model that have no memory yet.

    Args: device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor; those without memory on the device of this rank."""
        return tensor.values().to(self._device) if isinstance(tensor, EmptyTensor) else tensor

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

        Raises: UsageError: a tensor has a hook, which would be lost.
        """
        new: dict[int, tuple[Tensor, Tensor]] = {}  # tied tensors stay tied
        for module in (inner for outer in modules for inner in outer.modules()):
            for name, tensor in list(_empty_tensors(module)):
                if id(tensor) not in new:
                    new[id(tensor)] = tensor, self._filled(name, tensor, axis)
                filled = new[id(tensor)][1]
                if keeps:
                    swap_tensors(tensor, filled)
                else:
                    # Through the module: an LSTM keeps a list of its weights besides.
                    setattr(module, name, filled)

    def _filled(self, name: str, tensor: EmptyTensor, axis: Axis | None) -> Tensor:
        """Return a tensor with memory and values, in the place of one without."""
        if has_hooks(tensor):
            raise UsageError(
                f"prepare: {name} {tuple(tensor.shape)} has a hook, and gets its memory just now, "
                "as another tensor. Register hooks after run.prepare."
            )
        if axis is None or axis.rank == 0:
            values = self.values(tensor)
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if axis is not None:
            axis.broadcast_tensor(values)
        if not isinstance(tensor, nn.Parameter):
            return values
        filled = nn.Parameter(values, tensor.requires_grad)
        vars(filled).update(tensor.own_attributes())
        return filled


def deferred_weights(model: nn.Module, device: torch.device) -> DeferredWeights | None:
    """Return the weights of a model that have no memory yet; None if all have."""
    return DeferredWeights(device) if empty_bytes(model) else None


def empty_bytes(model: nn.Module) -> int:
    """Return the bytes that the weights of a model will take which have no memory yet."""
    empty = dict.fromkeys(t for module in model.modules() for _, t in _empty_tensors(module))
    return sum(tensor.numel() * tensor.element_size() for tensor in empty)


def seeds_of(model: nn.Module) -> list[int]:
    """Return the seeds from which the weights of a model without memory follow, in their order."""
    empty = (tensor for module in model.modules() for _, tensor in _empty_tensors(module))
    return [calls.seed for calls in dict.fromkeys(tensor.calls for tensor in empty)]


def broadcast_filled(model: nn.Module, axis: Axis) -> None:
    """Copy the first rank's parameters and buffers that have memory to all. Collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, EmptyTensor):
            axis.broadcast_tensor(tensor.detach())


def _empty_tensors(module: nn.Module) -> Iterator[tuple[str, EmptyTensor]]:
    """Yield the own parameters and buffers of a module that have no memory."""
    for store in (own_parameters(module), own_buffers(module)):
        for name, tensor in store.items():
            if isinstance(tensor, EmptyTensor):
                yield name, tensor
