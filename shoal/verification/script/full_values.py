"""Whole tensors of a rank, whatever holds them, and numbers that tell their values apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.norm import full_tensor
from shoal.errors import UsageError
from shoal.run import Run
from shoal.run.train_state import full_state_dict
from shoal.strategies.pipeline.absent import AbsentTensor
from shoal.strategies.tensor.lazy_gather import LazyGatherTensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, detached, on the CPU; a copy. Collective for a DTensor."""
    # The clone waits for what a collective still brings.
    return _without_class(full_tensor(tensor.detach()).clone()).cpu()


def local_part(tensor: Tensor) -> Tensor | None:
    """Return what this rank has of a tensor, detached, on the CPU; None if it has nothing.

    A copy: the next layer may write into its input.
    """
    if isinstance(tensor, AbsentTensor):
        return None
    if isinstance(tensor, LazyGatherTensor):
        tensor = tensor.local
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return _without_class(tensor.clone()).cpu()


def is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor that holds its own values, on which hooks may lie."""
    return type(tensor) in (Tensor, nn.Parameter, DTensor)


def _without_class(tensor: Tensor) -> Tensor:
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def digest(tensor: Tensor) -> list[float]:
    """Return two numbers that differ where the values of two tensors do: norm and projection."""
    flat = tensor.detach().flatten()
    flat = flat.double() if not flat.is_complex() else torch.view_as_real(flat).double().flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).cos()
    return [float(flat.norm()), float(flat @ weights)] if flat.numel() else [0.0, 0.0]


def digests(tensors: Mapping[str, Tensor], kind: str) -> dict[str, list[float]]:
    """Return the digests of tensors, under `kind/NAME`."""
    return {f"{kind}/{name}": digest(tensor) for name, tensor in tensors.items()}


class ShoalValues:
    """Reads values of a prepared run. All methods but `axes`, `root` and `buffers` are collective.

    Attributes:
        run: of this rank.
        prepared: what it has prepared.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.prepared = run._prepared
        # Taken before a pipeline cuts the model, which it does in the first step.
        named = self.root.named_parameters(remove_duplicate=False) if self.root is not None else ()
        self._names = {name for name, _ in named}

    def axes(self) -> dict[str, tuple[int, int]]:
        """Return this rank's number on each axis of the mesh, and the axis' length."""
        mesh = self.run.mesh
        axes = {"data": mesh.data, "tensor": mesh.tensor, "pipeline": mesh.pipeline}
        return {name: (axis.rank, axis.size) for name, axis in axes.items()}

    @property
    def root(self) -> nn.Module | None:
        """The model, or the group of all models; None before one is prepared."""
        return self.prepared.root if self.prepared.models else None

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the full gradient of each trainable parameter; empty where none remain."""
        try:
            found = self.run.gradients()
        except UsageError:  # freed in the backward pass, or each rank steps by its own
            return {}
        return {name: None if g is None else whole(g) for name, g in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return the full parameters after the step.

        Unlike `Run.weights` it leaves buffers as they are, and synchronises no ranks.
        """
        local_model = self.prepared.local_model()
        local_model.strategy_state.wait()
        found = full_state_dict(local_model)
        return {name: whole(value) for name, value in found.items() if name in self._names}

    def buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers."""
        module = self.prepared.local_model().module
        return {name: whole(buffer) for name, buffer in module.named_buffers()}
