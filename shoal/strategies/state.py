"""State that a strategy keeps from step to step, beside weights and the optimizer's state.

gradient compression   residuals that messages have left out
DiLoCo                 momentum of its outer optimizer
parameter servers      the optimizer's state itself
all others             `STATELESS`

Where other processes step, as parameter servers do, `RemoteOptimizer` is what a run asks them for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from shoal.parameter_server.node.event_log import Event


class StrategyState:
    """State of a strategy: how it is saved, and how all ranks get the same weights.

    That of a strategy that keeps none: weights are equal on all ranks after each step.

    Attributes:
        remote_optimizer: the optimizer in other processes that steps the parameters; None if this
            rank steps.
        has_rank_local_optimizer: each rank steps with its own gradients, and has an optimizer state
            of its own.
        is_synchronous: all ranks take each step together, so a step has global gradients.
        in_gradient_units: the state has the unit of gradients. The changing loss scale of fp16
            would make it wrong, so fp16 is refused.
    """

    remote_optimizer: RemoteOptimizer | None = None
    has_rank_local_optimizer: bool = False
    is_synchronous: bool = True
    in_gradient_units: bool = False

    def synchronize(self) -> bool:
        """Wait until every rank has the same weights, with all steps applied. Collective.

        Returns: True if weights were different on the ranks.
        """
        return False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that is equal on every rank."""
        return {}

    def rank_state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank alone."""
        return {}

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        """Load what `state_dict` and `rank_state_dict` returned.

        Args:
            state, private: may hold entries of other strategies, or none. `private` is empty if the
                number of ranks has changed.

        Returns: sentences about state that is lost.
        """
        return []

    def wait(self) -> None:
        """Wait until this rank has the values of the last step. Called on any rank."""

    def report(self) -> list[str]:
        """Return lines for the end of a run, about events beside the steps. Called on one rank."""
        return []

    def pull_state(self, optimizer: Optimizer) -> None:
        """Copy optimizer state of other processes to `optimizer.state`, to be read. Collective.

        It is dropped at the next step.
        """

    def push_state(self, optimizer: Optimizer) -> None:
        """Send this rank's parameters and `optimizer.state` to all owners. Collective.

        The next step starts from them.
        """


STATELESS = StrategyState()
"""State of all strategies that keep none."""


class RemoteOptimizer(Protocol):
    """Processes that own the parameters, sum the gradients and step.

    They keep the optimizer's state; the local model's `StrategyState` saves it. Every call is
    collective unless its docstring says otherwise.

    Attributes:
        has_pushed: the owners have gradients, and wait for `optimizer.step()`.
        removed: returns the names of parameters whose gradients the script has removed since the
            last backward pass. The run sets it; at first it returns none.
        zeroed: names of parameters whose gradients the script has set to zero, and not to None,
            before the passes of a step. The run sets it.
    """

    has_pushed: bool
    removed: Callable[[], list[str]]
    zeroed: Container[str]

    def attach(self, optimizer: Optimizer) -> None:
        """Send the parameters and the settings of `optimizer` to the owners.

        From now on `optimizer.step()` finds no gradients.
        """

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the full global gradients that the next step will use, by name."""

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all global gradients, a scalar; `norm_type` is 2 or infinity."""

    def scale(self, factor: Tensor | float) -> None:
        """Multiply the global gradients by a scalar. Called on one rank."""

    def leave_out(self) -> None:
        """Drop the gradients of this step: the next `optimizer.step()` changes nothing.

        Called on all ranks, or on one whose pushes are steps of their own.
        """

    def publish_address(self, directory: Path) -> None:
        """Write the address to the run's directory, for commands. Called on one rank."""

    def record(self) -> None:
        """Have the owners log the order in which they apply pushes.

        Raises: StrategyRefused: the order is fixed anyway.
        """

    def history(self) -> list[Event]:
        """Return the log since the last call. Called on one rank, always the same."""
