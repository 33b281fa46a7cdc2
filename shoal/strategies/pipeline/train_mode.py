"""All modules of a model in one mode for a while, and then each in its own again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """As a step finds it: as it is where it is in training, parts in evaluation mode too; else
    as after train().
    """
    if model.training:
        yield
    else:
        with in_mode(model, True):
            yield
