"""The optimizer's step where it is taken in other processes: parameter servers do."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from shoal.parameter_server.node.event_log import Event


class RemoteOptimizer(Protocol):
    """Owners that are other processes: they sum the gradients and step.

    The optimizer's state that they keep is saved through the part's `StrategyState`. Every call is
    collective unless it says otherwise.
    """

    def attach(self, optimizer: Optimizer) -> None:
        """Hand over the owned parameters, which the optimizer holds by now. Its own steps find
        no gradients.
        """
        ...

    def gradients(self) -> dict[str, Tensor | None]:
        """The global gradients that the next step will take, whole."""
        ...

    def norm(self) -> Tensor:
        """Of all global gradients together."""
        ...

    def scale(self, factor: Tensor | float) -> None:
        """Multiply the global gradients by a number. For one rank."""
        ...

    def publish_address(self, directory: Path) -> None:
        """Let a command find it by the run's directory. For one rank."""
        ...

    def record(self) -> None:
        """Have the owners note from now on in what order they apply what comes. Raises
        StrategyRefused.
        """
        ...

    def history(self) -> list[Event]:
        """What they have noted since the last call. For one rank, always the same."""
        ...
