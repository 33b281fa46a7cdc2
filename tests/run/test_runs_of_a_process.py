"""Several runs in one process, as for the folds of a cross-validation."""

from __future__ import annotations

import gc
from weakref import ref

import torch
from torch import nn

import shoal
from shoal.testing import world


def models_alive_after_their_run() -> list[bool]:
    models = []
    for _ in range(3):
        run = shoal.init("ddp", announce=lambda _: None)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        run.backward(model(run.share(torch.ones(8, 4))).square().mean())
        optimizer.step()
        models.append(ref(model))
        del run, model, optimizer
    gc.collect()
    return [model() is not None for model in models[:-1]]  # the last run may be asked for a report


def test_a_run_that_another_one_follows_keeps_no_model_alive() -> None:
    assert models_alive_after_their_run() == [False, False]
    for alive in world.run(2, models_alive_after_their_run):
        assert alive == [False, False]
