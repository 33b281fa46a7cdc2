"""Classes for `MODULE:CLASS` in a strategy text: a strategy, and classes that are none."""

from dataclasses import dataclass

from shoal.comm.mesh import Mesh
from shoal.strategies.base import LocalModel, Strategy

NOT_A_CLASS = 3


@dataclass(frozen=True)
class Mine(Strategy):
    value = "count"
    count: int = 1
    name: str = "herring"

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        return model


class WithoutBase:
    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        return model


class WithoutApply(Strategy):
    pass
