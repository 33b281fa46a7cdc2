"""The strategy for one device: it changes nothing."""

from __future__ import annotations

from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.options import NoOptions


class Single(NoOptions, Strategy):
    """The reference with which every other strategy is compared."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Return `model` unchanged. Raises StrategyRefused in a world of several ranks."""
        if mesh.data.size > 1:
            raise StrategyRefused(
                f"strategy single trains on one rank; there are {mesh.data.size}. Use ddp, or "
                "start one process."
            )
        return model
