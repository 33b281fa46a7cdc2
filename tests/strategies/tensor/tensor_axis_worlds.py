"""Data strategies in a world that has a tensor axis as well, along which nothing is cut: its
ranks do the same.
"""

from dataclasses import dataclass

from shoal.strategies.ddp.strategy import Ddp
from shoal.strategies.zero.strategy import Zero1, Zero3

SPANS = {"tensor": 2}


@dataclass(frozen=True)
class BesideDdp(Ddp):
    mesh_dims = SPANS


@dataclass(frozen=True)
class BesideZero1(Zero1):
    @property
    def mesh_dims(self) -> dict[str, int]:
        return super().mesh_dims | SPANS


@dataclass(frozen=True)
class BesideZero3(Zero3):
    @property
    def mesh_dims(self) -> dict[str, int]:
        return super().mesh_dims | SPANS
