"""Each kind of run gets the right layout of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.comm.axis import Axis
from shoal.strategies import options
from shoal.strategies.base import LocalModel, PassTraits
from shoal.strategies.ddp.layout_choice import LayoutName, choose_layout
from shoal.strategies.single import single_device

SMALL = nn.Linear(8, 8)
LARGE = nn.Linear(1100, 1000)  # 4.2 MiB
ROWS = nn.Embedding(8, 4, sparse=True)
WAVES = nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=torch.complex64))])
MIXED = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())


def layout(
    model: nn.Module | LocalModel, ranks: int = 2, device: str = "cpu", **asked: object
) -> LayoutName:
    part = model if isinstance(model, LocalModel) else single_device(model)
    axis = Axis(0, ranks, torch.device(device))
    return choose_layout(options.DdpOptions(**asked), part, axis)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_small_model_has_a_single_message(ranks: int) -> None:
    assert layout(SMALL, ranks) is LayoutName.SINGLE


@pytest.mark.parametrize("model", [LARGE, WAVES, MIXED])
def test_a_large_model_and_what_is_not_of_one_plain_type_have_the_engine(model: nn.Module) -> None:
    assert layout(model) is LayoutName.ENGINE


def test_what_is_larger_than_a_bucket_has_the_engine() -> None:
    assert layout(SMALL, bucket_mb=0.0001) is LayoutName.ENGINE


def test_a_model_on_a_gpu_has_the_engine() -> None:
    assert layout(SMALL, device="cuda") is LayoutName.ENGINE


def test_a_named_algorithm_has_the_engine_however_small_the_model() -> None:
    assert layout(SMALL, allreduce="ring") is LayoutName.ENGINE


def test_compressed_gradients_have_buckets_however_small_the_model() -> None:
    assert layout(SMALL, compress="bf16") is LayoutName.BUCKETS


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(2, LayoutName.ENGINE), (3, LayoutName.BUCKETS)],
)
def test_sparse_gradients_have_buckets_where_their_sum_has_several_orders(
    ranks: int,
    expected: LayoutName,
) -> None:
    assert layout(ROWS, ranks) is expected


def test_a_stage_of_a_pipeline_has_buckets() -> None:
    assert (
        layout(replace(single_device(SMALL), pass_traits=PassTraits(complete_after_run=True)))
        is LayoutName.BUCKETS
    )
