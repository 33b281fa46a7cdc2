"""What couples the samples of a batch is exact on any number of ranks: gathered rows, statistics
of BatchNorm, and random numbers.
"""

from collections.abc import Callable
from typing import Any

import coupled_script as script
import pytest
import torch
from torch import Tensor, nn

from shoal.testing import world

Result = tuple[dict[str, Tensor], list[float], list[str]]
Case = tuple[str, Callable[[], nn.Module], Callable[..., Any], dict[str, Any]]


def all_of(cases: list[Case]) -> list[Result]:
    """Train every case one after the other."""
    return [
        script.trained(strategy, make_model(), make_loss, **options)
        for strategy, make_model, make_loss, options in cases
    ]


def plain(cases: list[Case]) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Train every case without Shoal."""
    return [
        script.trained_plainly(make_model(), make_loss, options.get("batch_size", 7))
        for _, make_model, make_loss, options in cases
    ]


def check_equal(ranks: int, cases: list[Case]) -> list[list[str]]:
    """Train cases on ranks and on one device, compare, and return the lines of rank 0."""
    expected = world.run(1, plain, cases)[0]
    found = world.run(ranks, all_of, cases)
    for results in found:
        for case, (weights, losses, _), (right, right_losses) in zip(
            cases, results, expected, strict=True
        ):
            assert losses == pytest.approx(right_losses, rel=1e-10), case
            for name, value in right.items():
                assert torch.allclose(weights[name], value, rtol=1e-9, atol=1e-11), (case, name)
    return [lines for _, _, lines in found[0]]


GATHERING: list[Case] = [
    ("ddp", script.tower, script.whole_contrastive_loss, {}),
    ("ddp", script.tower, script.contrastive_loss_of_own_rows, {}),
    ("zero3", script.tower, script.contrastive_loss_of_one_call, {}),
    ("server=1", script.tower, script.contrastive_loss_of_one_call, {}),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_contrastive_loss_of_gathered_rows_trains_as_on_one_device(ranks: int) -> None:
    # The last batch has two samples: the third rank has none.
    check_equal(ranks, GATHERING)


@pytest.mark.parametrize("ranks", [2, 3])
def test_batchnorm_over_all_ranks_trains_as_on_one_device(ranks: int) -> None:
    synced = {"sync_batchnorm": True, "batch_size": 8}
    cases: list[Case] = [
        ("ddp", script.batchnorm_model, script.plain_loss, synced),
        ("ddp,bucket_mb=0.0001", script.batchnorm_model, script.plain_loss, synced),
        ("recompute,unit=Linear,ddp", script.batchnorm_model, script.plain_loss, synced),
        ("zero2", script.batchnorm_model, script.plain_loss, synced),
        ("zero3", script.batchnorm_model, script.plain_loss, synced),
        ("server=1", script.batchnorm_model, script.plain_loss, synced),
    ]
    for lines in check_equal(ranks, cases):
        assert not any("BatchNorm" in line for line in lines)


@pytest.mark.parametrize("ranks", [2, 3])
def test_global_draws_train_as_on_one_device(ranks: int) -> None:
    cases: list[Case] = [
        ("ddp", script.Noisy, script.noisy_loss, {"draws": "global", **options})
        for options in ({}, {"accumulate": 2}, {"accumulate": 3})
    ]
    cases += [
        ("zero3", script.Noisy, script.noisy_loss, {"draws": "global"}),
        ("zero2", script.Noisy, script.noisy_loss, {"draws": "global", "accumulate": 2}),
        ("recompute,unit=Dropout,ddp", script.Noisy, script.noisy_loss, {"draws": "global"}),
    ]
    for lines in check_equal(ranks, cases):
        assert not any("draws" in line for line in lines)
