"""Requests of a strategy for modules that must lie in one stage of a pipeline.

Tensor parallelism divides a pair of layers only if no stage begins between them. The pipeline
applies first, so it receives these requests, and begins its stages elsewhere as far as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from shoal.strategies.full_model import FullModel


class Colocation(NamedTuple):
    """Modules that must lie in one stage.

    Attributes:
        names: paths of modules. Each is a module that a node of the graph calls, or a module inside
            such a one. All nodes between them belong to the colocation.
        through_output: all nodes after them belong to it too.
    """

    names: Set[str]
    through_output: bool = False


ColocationRequest = Callable[[FullModel], Sequence[Colocation]]
"""Takes a model that is still one stage; called on one rank. May raise StrategyRefused."""
