"""State that a strategy keeps from step to step, beside weights and the optimizer's state.

Compression keeps what it has left out of messages, DiLoCo the momentum of its outer optimizer,
parameter servers the optimizer's state itself. Most strategies keep nothing: `STATELESS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer


class StrategyState(ABC):
    """State of a strategy: how it is saved, and how all ranks come to hold the same weights.

    Attributes:
        alone: every rank steps by gradients of its own, with an optimizer state of its own.
        together: all ranks take each step together, so that it has global gradients.
        in_gradient_units: it is in the unit of gradients, which a loss scale of fp16 would change.
    """

    has_rank_local_optimizer: bool = False
    is_synchronous: bool = True
    in_gradient_units: bool = True

    @abstractmethod
    def synchronize(self) -> bool:
        """Wait until every rank has the same weights, those of all steps. Collective.

        Returns: whether the ranks had been apart.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return what is the same on every rank."""

    @abstractmethod
    def rank_state_dict(self) -> dict[str, Tensor]:
        """Return what this rank alone keeps."""

    @abstractmethod
    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        """Take back what `state` and `private` returned. Both may hold other things, or nothing.

        Args: private: empty if the number of ranks has changed.
        Returns: sentences about what could not be kept.
        """

    def wait(self) -> None:
        """Wait until this rank has the values of the last step. For one rank."""
        return None

    def report(self) -> list[str]:
        """Return lines about what went on beside the steps, for the end of a run. For one rank."""
        return []

    def pull_state(self, optimizer: Optimizer) -> None:
        """Put optimizer state that lies elsewhere into `optimizer.state`, to be read. Collective.

        It is dropped at the next step.
        """
        return None

    def push_state(self, optimizer: Optimizer) -> None:
        """Have all owners go on from this rank's parameters and `optimizer.state`. Collective."""
        return None


class Stateless(StrategyState):
    """State of a strategy that keeps nothing: its ranks are never apart."""

    in_gradient_units = False

    def synchronize(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def rank_state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        return []


STATELESS = Stateless()
"""Nothing is kept."""
