"""Distributed data parallel: see `strategy.py`."""
