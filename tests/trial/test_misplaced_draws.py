"""Draws whose samples lie elsewhere than their shape says, which `draws="global"` goes by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal import init
from shoal.errors import UsageError
from shoal.testing import world
from shoal.trial import LossKind, try_loss

SAMPLES, WIDTH = 12, 6
Draw = Callable[[Tensor], Tensor]


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def time_first(x: Tensor) -> Tensor:
    return F.dropout(x.T.contiguous(), 0.5).T


def two_views(x: Tensor) -> Tensor:
    return F.dropout(torch.cat([x, x + 1]), 0.5).view(2, *x.shape).sum(0)


def positions(x: Tensor) -> Tensor:
    return x + F.dropout(torch.ones(WIDTH, 1), 0.5).T


def channels(x: Tensor) -> Tensor:
    return F.dropout(x.view(len(x), 2, 3), 0.5).flatten(1)


@pytest.mark.parametrize(
    ("draw", "rows", "message"),
    [
        (dropout, 1, ""),
        (dropout, WIDTH, ""),
        (channels, 2, ""),
        (lambda x: F.dropout(x.unsqueeze(0), 0.5)[0], 1, ""),
        (lambda x: F.dropout(x.repeat_interleave(3, 0), 0.5)[::3], 4, ""),
        (time_first, 4, ""),
        (
            time_first,
            WIDTH,
            "samples are in dimension 1, and its shape says 6 samples in dimension 0",
        ),
        (lambda x: F.dropout(x.T, 0.5).T, 1, "in which order it lies in memory"),
        (positions, 5, ""),
        (positions, 3, "samples are in no dimension, and its shape says 3 samples in dimension 0"),
        (two_views, 4, "several blocks"),
    ],
)
def test_what_a_shape_does_not_tell_is_seen_in_the_trial(
    draw: Draw, rows: int, message: str
) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(SAMPLES, WIDTH)

    def compute_loss(x: Tensor) -> Tensor:
        return draw(model(x)).square().mean()

    verdict = try_loss(compute_loss, (x,), {}, SAMPLES, [model], [rows])
    assert verdict.kind is LossKind.MEAN
    assert bool(verdict.misplaced) == bool(message)
    assert message in verdict.misplaced
    assert verdict.objects == bool(message)


def trains_time_first(samples: int) -> None:
    run = init(draws="global", announce=lambda _: None)
    model = torch.nn.Linear(WIDTH, WIDTH)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    batch = run.share(torch.ones(samples, WIDTH))
    run.forward_backward(lambda x: time_first(model(x)).square().mean(), batch)


def refuses_squares() -> None:
    trains_time_first(2 * WIDTH + 2)
    with pytest.raises(UsageError, match="Choose another batch size"):
        trains_time_first(2 * WIDTH)


def test_a_step_of_global_draws_is_refused_before_it_draws_for_other_samples() -> None:
    world.run(2, refuses_squares)
