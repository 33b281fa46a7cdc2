"""Weights that come into being late: a model that is larger than a rank never is there whole.

empty_weights()            modules are built, parameters have shapes and no memory
load_weights(model, path)  notes which file has the values of each
run.prepare                a strategy fills one layer, keeps its share, and goes on
"""

from __future__ import annotations

from shoal.weights.deferred_init import empty_weights
from shoal.weights.weight_files import load_weights

__all__ = ["empty_weights", "load_weights"]
