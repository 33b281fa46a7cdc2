"""torch.compile: the model's forward pass as compiled kernels; parameters keep their names."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused
from shoal.strategies.base import LocalModel, Strategy


@dataclass(frozen=True)
class Compile(Strategy):
    """Applied before the data strategy, whose hooks stay outside the compiled graph."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Compiles the module in place, at its first batch. Raises StrategyRefused: in a
        pipeline.
        """
        if not model.pass_traits.module_called:
            raise StrategyRefused(
                "compile with a pipeline: stages are not compiled. Use compile=False."
            )
        model.module.compile()
        return model
