"""Where the tensors of a divided model belong, so that every rank can hold all of them again.

divided    rank 0   0.weight   (2.weight: no values)    rank 1   (0.weight: no values)   2.weight
restored   rank 0   0.weight   2.weight                 rank 1   0.weight                2.weight

A parameter that a script holds since before the division gets its values and its place back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.assembly import gather_named_tensors
from shoal.comm.axis import Axis
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.strategies.full_model import given_up_params
from shoal.strategies.pipeline.stage_module import StageModule


class TensorPlaces:
    """The names of all parameters and buffers of a model, as they were before it was divided.

    Args:
        model: the full model; no rank has given up a tensor yet.
        local_module: what the stages of this rank use of it.
        axis: the pipeline axis.
    """

    def __init__(self, model: nn.Module, local_module: StageModule, axis: Axis) -> None:
        self._model = model
        self._local_module = local_module
        self._axis = axis
        names = {id(tensor): name for name, tensor in reversed([*_named_tensors(model)])}
        self._names = {name: names[id(tensor)] for name, tensor in _named_tensors(model)}
        self._local_names = {
            name: names[id(tensor)] for name, tensor in _named_tensors(local_module)
        }

    def restore(self) -> None:
        """Give every tensor of the model its values, on every rank. Collective."""
        here = dict(_named_tensors(self._local_module))
        local = {full: here[name] for name, full in self._local_names.items() if name in here}
        gathered = gather_named_tensors(self._axis, local)
        restored: dict[str, Tensor] = {}  # tied tensors stay one
        for path, table, key in _places(self._model):
            tensor, name = table[key], self._names.get(f"{path}{key}", "")
            value = gathered.get(name)
            if tensor is None or value is None or tensor is local.get(name):
                continue
            if name not in restored:
                restored[name] = _with_values(tensor, value)
            table[key] = restored[name]


def _with_values(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with these values to stand where `tensor` does: the one that was there before
    the division, if a script may hold it.
    """
    with torch.no_grad():
        if not tensor.is_meta:  # its values are elsewhere, and newer; a buffer's are its own
            if isinstance(tensor, nn.Parameter):
                tensor.copy_(value)
            return tensor
        filled = torch.empty_like(tensor, device=value.device).copy_(value)
    if not isinstance(tensor, nn.Parameter):
        return filled
    former = next((old for old in given_up_params(tensor) if not old.is_meta), None)
    if former is None:
        return nn.Parameter(filled, tensor.requires_grad)
    former.data = filled
    former.requires_grad = tensor.requires_grad
    return former


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, also by the further names of those that have several."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the path of a module with a dot, one of its tables of tensors, and a key of that."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for table in (own_parameters(module), own_buffers(module)):
            for key in [*table]:
                yield prefix, table, key
