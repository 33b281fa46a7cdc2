"""Each kind of run gets the right layout of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.comm.axis import Axis
from shoal.strategies import options
from shoal.strategies.base import LocalModel, PassTraits
from shoal.strategies.ddp.layout_choice import takes_torchs_engine
from shoal.strategies.single import single_device

SMALL = nn.Linear(8, 8)
LARGE = nn.Linear(1100, 1000)  # 4.2 MiB
ROWS = nn.Embedding(8, 4, sparse=True)
WAVES = nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=torch.complex64))])
MIXED = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())


def has_engine(
    model: nn.Module | LocalModel, ranks: int = 2, device: str = "cpu", **asked: object
) -> bool:
    part = model if isinstance(model, LocalModel) else single_device(model)
    axis = Axis(0, ranks, torch.device(device))
    return takes_torchs_engine(options.DdpOptions(**asked), part, axis)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", [SMALL, WAVES, MIXED])
def test_a_small_model_has_buckets_of_our_own(model: nn.Module, ranks: int) -> None:
    assert not has_engine(model, ranks)


def test_a_large_model_has_torchs_engine() -> None:
    assert has_engine(LARGE)


def test_what_is_larger_than_a_bucket_has_the_engine() -> None:
    assert has_engine(SMALL, bucket_mb=0.0001)


def test_a_model_on_a_gpu_has_the_engine() -> None:
    assert has_engine(SMALL, device="cuda")


def test_a_named_algorithm_has_the_engine_however_small_the_model() -> None:
    assert has_engine(SMALL, allreduce="ring")


@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_compressed_gradients_have_buckets_of_our_own(model: nn.Module) -> None:
    assert not has_engine(model, compress="bf16")


@pytest.mark.parametrize(("ranks", "engine"), [(2, True), (3, False)])
def test_sparse_gradients_have_our_buckets_where_their_sum_has_several_orders(
    ranks: int, engine: bool
) -> None:
    assert has_engine(ROWS, ranks) is engine


def test_a_stage_of_a_pipeline_has_buckets_of_our_own() -> None:
    traits = PassTraits(complete_after_run=True)
    assert not has_engine(replace(single_device(LARGE), pass_traits=traits))
