"""Full gradients, weights and buffers of a run of Shoal, whatever strategy holds them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.run import Run
from shoal.run.inspection import (
    draws_of_loop,
    full_parameters,
    local_buffers,
    models_of,
    optimizers_of,
)
from shoal.verification.script.full_values import whole


class ShoalValues:
    """Reads values of a prepared run. All methods but `axes`, `root` and `buffers` are collective.

    Args: run: of this rank.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        root = models_of(run)
        # Taken before a pipeline cuts the model, which it does in the first step.
        named = [] if root is None else root.named_parameters(remove_duplicate=False)
        self._names = {name for name, _ in named}

    def axes(self) -> dict[str, tuple[int, int]]:
        """Return this rank's number on each axis of the mesh, and the axis' length."""
        mesh = self._run.mesh
        axes = {"data": mesh.data, "tensor": mesh.tensor, "pipeline": mesh.pipeline}
        return {name: (axis.rank, axis.size) for name, axis in axes.items()}

    def root(self) -> nn.Module | None:
        """Return the model, or the group of all models; None before one is prepared."""
        return models_of(self._run)

    @property
    def is_synchronous(self) -> bool:
        """Return True if all ranks take each step together."""
        return self._run.is_synchronous

    @property
    def draws_of_loop(self) -> str:
        """Return what the loop draws random numbers by for its samples; "" if by nothing."""
        return draws_of_loop(self._run)

    def has(self, optimizer: Optimizer) -> bool:
        """Return True if the run has prepared this optimizer."""
        return any(optimizer is known for known in optimizers_of(self._run))

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the full gradient of each trainable parameter; empty where none remain."""
        try:
            found = self._run.gradients()
        except UsageError:  # freed in the backward pass, or each rank steps by its own
            return {}
        return {name: None if g is None else whole(g) for name, g in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return the full parameters after the step."""
        found = full_parameters(self._run, self._names)
        return {name: whole(value) for name, value in found.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers."""
        return {name: whole(buffer) for name, buffer in local_buffers(self._run).items()}
