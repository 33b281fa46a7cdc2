"""Data strategies in a world that has a tensor axis as well, along which nothing is cut: its ranks do the same."""

from dataclasses import dataclass

from shoal.strategies.ddp import Ddp
from shoal.strategies.zero import Zero1, Zero3

SPANS = {"tensor": 2}


@dataclass(frozen=True)
class BesideDdp(Ddp):
    spans = SPANS


@dataclass(frozen=True)
class BesideZero1(Zero1):
    @property
    def spans(self) -> dict[str, int]:
        return super().spans | SPANS


@dataclass(frozen=True)
class BesideZero3(Zero3):
    @property
    def spans(self) -> dict[str, int]:
        return super().spans | SPANS
