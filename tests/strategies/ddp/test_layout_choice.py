"""Each kind of run gets the right layout of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.axis import Axis
from shoal.strategies import options
from shoal.strategies.base import LocalModel, PipelineTraits
from shoal.strategies.ddp.strategy import takes_torchs_engine
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


ASKED = [{"bucket_mb": 0.0001}, {"device": "cuda"}, {"allreduce": "ring"}]


@pytest.mark.parametrize(("model", "asked"), [(LARGE, {}), *((SMALL, each) for each in ASKED)])
def test_torchs_engine_has_large_models_and_what_it_does_better(
    model: nn.Module, asked: dict[str, Any]
) -> None:
    assert has_engine(model, **asked)


def test_compressed_gradients_have_buckets_of_our_own() -> None:
    assert not has_engine(LARGE, compress="bf16")


@pytest.mark.parametrize(("ranks", "engine"), [(2, True), (3, False)])
def test_sparse_gradients_have_our_buckets_where_their_sum_has_several_orders(
    ranks: int, engine: bool
) -> None:
    assert has_engine(ROWS, ranks) is engine


def test_a_stage_of_a_pipeline_has_buckets_of_our_own() -> None:
    traits = PipelineTraits(Axis(0, 2, torch.device("cpu")))
    assert not has_engine(replace(single_device(LARGE), pipeline=traits))
