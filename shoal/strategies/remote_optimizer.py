"""The optimizer's step in other processes, as parameter servers take it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from shoal.parameter_server.node.event_log import Event


class RemoteOptimizer(Protocol):
    """Processes that own the parameters, sum the gradients and step.

    They keep the optimizer's state; the local model's `StrategyState` saves it. Every call is
    collective unless its docstring says otherwise.
    """

    def attach(self, optimizer: Optimizer) -> None:
        """Send the parameters and the settings of `optimizer` to the owners.

        From now on `optimizer.step()` finds no gradients.
        """
        ...

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the full global gradients that the next step will use, by name."""
        ...

    def norm(self) -> Tensor:
        """Return the 2-norm of all global gradients, a scalar tensor."""
        ...

    def scale(self, factor: Tensor | float) -> None:
        """Multiply the global gradients by a scalar. Called on one rank."""
        ...

    def leave_out(self) -> None:
        """Drop the gradients of this step: the next `optimizer.step()` changes nothing.

        Called on all ranks, or on one whose pushes are steps of their own.
        """
        ...

    def publish_address(self, directory: Path) -> None:
        """Write the address to the run's directory, for commands. Called on one rank."""
        ...

    def record(self) -> None:
        """Have the owners log the order in which they apply pushes.

        Raises: StrategyRefused: the order is fixed anyway.
        """
        ...

    def history(self) -> list[Event]:
        """Return the log since the last call. Called on one rank, always the same."""
        ...
