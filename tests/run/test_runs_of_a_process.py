"""Several runs in one process, as for the folds of a cross-validation."""

from __future__ import annotations

import gc
import os
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.testing import world
from tests.harness import waiting
from tests.harness.process_tree import children


def models_alive_after_their_run(strategy: str) -> list[bool]:
    models = []
    for _ in range(3):
        run = shoal.init(strategy, announce=lambda _: None)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        run.forward_backward(lambda x, model=model: model(x).square().mean(), torch.ones(8, 4))
        optimizer.step()
        models.append(ref(model))
        del run, model, optimizer
    gc.collect()
    return [model() is not None for model in models[:-1]]  # the last run may be asked for a report


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "server=1"])
def test_a_run_that_another_one_follows_keeps_no_model_alive(strategy: str) -> None:
    for alive in world.run(2, models_alive_after_their_run, strategy):
        assert alive == [False, False]


def test_a_run_on_one_process_that_another_one_follows_keeps_no_model_alive() -> None:
    assert models_alive_after_their_run("ddp") == [False, False]


def helpers_after_each_rank_has_dropped_its_run() -> list[int]:
    run = shoal.init("server=1", announce=lambda _: None)
    model = nn.Linear(4, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    del run, model
    shoal.init("ddp", announce=lambda _: None)
    dropped = []
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            gc.collect()
        dist.barrier()
        dropped.append(len(children(os.getpid())))
    waiting.until(lambda: not children(os.getpid()), 20)
    return dropped


def test_servers_end_once_every_rank_has_dropped_its_run() -> None:
    on_starter = world.run(2, helpers_after_each_rank_has_dropped_its_run)[0]
    assert on_starter[0] > 0, "the other rank still has its run"
