"""Distributed data parallel: see `strategy.py`."""

from shoal.strategies.ddp.strategy import Ddp

__all__ = ["Ddp"]
