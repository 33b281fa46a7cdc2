"""torch.compile of the model's forward pass. Parameters keep their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused
from shoal.strategies.base import LocalModel, Strategy


@dataclass(frozen=True)
class Compile(Strategy):
    """Compiles the module. Applies before the data strategy, whose hooks then stay uncompiled."""

    takes_empty_weights: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Mark the module to be compiled in place, at its first batch.

        Raises: StrategyRefused: in a pipeline.
        """
        if model.is_partial:
            raise StrategyRefused(
                "compile with a pipeline: stages are not compiled. Use compile=False."
            )
        model.module.compile()
        return model
