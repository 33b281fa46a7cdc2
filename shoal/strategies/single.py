"""One device: nothing is cut, nobody is asked."""

from __future__ import annotations

from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.options import NoOptions


class Single(NoOptions, Strategy):
    """The reference that every other strategy is measured against."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """`model`, unchanged. Raises StrategyRefused in a world of several ranks."""
        if mesh.data.size > 1:
            raise StrategyRefused(
                f"strategy single trains on one rank; there are {mesh.data.size}. Use ddp, or "
                "start one process."
            )
        return model
