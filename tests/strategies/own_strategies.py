"""Classes that a line may name: a strategy of one's own, and some that are none."""

from dataclasses import dataclass

from shoal.comm.mesh import Mesh
from shoal.strategies.base import LocalModel, Strategy

NOT_A_CLASS = 3


@dataclass(frozen=True)
class Mine(Strategy):
    value = "count"
    count: int = 1
    name: str = "herring"

    def apply_strategies(self, part: LocalModel, mesh: Mesh) -> LocalModel:
        return part


class WithoutBase:
    def cut(self, part: LocalModel, mesh: Mesh) -> LocalModel:
        return part


class WithoutCut(Strategy):
    pass
