"""What a strategy offers whose owners are other processes: parameter servers do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from shoal.server.history import Event


class Remote(Protocol):
    """Owners that are other processes: they sum the gradients, step, and keep the optimizer's state.

    Every call is collective unless it says otherwise.
    """

    together: bool
    """All ranks take each step together."""

    def take(self, optimizer: Optimizer) -> None:
        """Hand over the owned parameters, which the optimizer holds by now. Its own steps find no gradients."""
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

    def wait(self) -> None:
        """Until this rank has the values of the last step. For one rank."""
        ...

    def agree(self) -> bool:
        """Until every rank has the same values, those of all steps; whether they had been apart."""
        ...

    def announce(self, directory: Path) -> None:
        """Let a command find it by the run's directory. For one rank."""
        ...

    def record(self) -> None:
        """Have the owners note from now on in what order they apply what comes. Raises StrategyRefused."""
        ...

    def history(self) -> list[Event]:
        """What they have noted since the last call. For one rank, always the same."""
        ...

    def report(self) -> list[str]:
        """Lines about what the owners have done, for the end of a run. For one rank."""
        ...

    def private(self) -> dict[str, Tensor]:
        """What this rank alone keeps from step to step. For one rank."""
        ...

    def load_private(self, found: Mapping[str, Tensor]) -> list[str]:
        """The inverse; `found` may hold other things as well. For one rank.

        Returns: sentences about what is lost.
        """
        ...

    def collect(self, optimizer: Optimizer) -> None:
        """Put the whole state into `optimizer.state`, to be read; it is dropped at the next step."""
        ...

    def spread(self, optimizer: Optimizer) -> None:
        """The inverse, also of the parameters: the owners go on from what this rank holds."""
        ...
