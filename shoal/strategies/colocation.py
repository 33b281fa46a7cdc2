"""Requests of a strategy for modules that must lie in one stage of a pipeline.

A strategy that slices a pair of layers can do so only where no stage begins inside the pair. The
pipeline is cut first, so it is handed these requests, and begins its stages elsewhere as far as
that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from shoal.strategies.full_model import FullModel


class Colocation(NamedTuple):
    """Modules that must lie in one stage.

    Args:
        names: of modules that steps call, or that lie in what they call. What is computed between
            them belongs to it.
        to_the_end: so does all that comes after them.
    """

    names: Set[str]
    through_output: bool = False


ColocationRequest = Callable[[FullModel], Sequence[Colocation]]
"""Takes a model that is one stage as yet, on one rank. May raise StrategyRefused."""
