"""Totals of a step: counts, summed values and stop requests, summed over all ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from minimal_script import parts, quiet
from torch import Tensor

import shoal
from shoal.errors import LaunchError
from shoal.run.supervised import supervised
from shoal.testing import world


def measured() -> list[list[float]]:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    totals = []

    def compute_loss(x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(model(x), y), {"targets": shoal.summed(y.double().sum()), "own": y}

    for x, y in loader:
        _, extra = run.forward_backward(compute_loss, x, y)
        assert run.totals is not None
        assert extra["targets"] == run.totals[3]
        assert torch.equal(extra["own"], y[: len(extra["own"])])
        totals.append(run.totals)
    return [of_step[1:4].tolist() for of_step in totals]  # they stay what they were


def test_counts_and_measures_of_a_step_are_sums_over_all_ranks() -> None:
    single = measured()
    assert [count for count, _, _ in single] == [4, 4, 2]
    assert world.run(3, measured) == [single] * 3


def measure_too_much() -> None:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    run.forward_backward(
        lambda x, y: (F.cross_entropy(model(x), y), shoal.summed(torch.ones(14))), x, y
    )


def test_more_summed_values_than_a_step_carries_are_refused() -> None:
    with pytest.raises(LaunchError, match="more than 12 summed numbers; a step carries 12"):
        world.run(2, measure_too_much)


def stop_seen_by_all() -> list[bool]:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    seen = []
    for step, (x, y) in enumerate(loader):
        if run.rank == 1 and step == 1:
            run.request_stop()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        seen.append(run.stopping())
    return seen


def test_all_ranks_learn_of_a_stop_in_the_same_step() -> None:
    assert world.run(2, stop_seen_by_all) == [[False, True, True]] * 2
