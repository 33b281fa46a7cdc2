"""Strategies on GPUs compute what a plain loop computes on the CPU."""

import pytest
import torch
from gpu_worlds import ON, by_hand, by_strategy, distance, on_ranks, require_cuda

ONE_DEVICE = [
    "single",
    "ddp",
    "dataparallel",
    "zero1",
    "zero2,offload=true",
    "zero3,offload=true",
    "recompute,single",
    "server=1",
    "server=1,staleness=0,part_mb=0.001",
    "local=1",
]
SEVERAL = [
    ("ddp", 2),
    ("ddp,bucket_mb=0.001", 2),
    ("ddp,unused=true,bucket_mb=0.001", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero2,offload=true", 2),
    ("zero3", 2),
    ("tensor=2", 2),
    ("tensor=2,sequence=true", 2),
    ("pipeline=2,schedule=gpipe", 2),
    ("pipeline=2,schedule=1f1b,microbatches=4", 2),
    ("pipeline=2,schedule=zero-bubble,microbatches=4", 2),
    ("pipeline=2,schedule=zbv,microbatches=4", 2),
    ("server=1", 2),
    ("server=2,replicas=2", 2),
    ("local=1", 2),
    ("ddp", 4),
    ("zero3,hybrid=2", 4),
    ("tensor=2,zero1", 4),
    ("pipeline=2,ddp", 4),
    ("pipeline=2,zero1", 4),
    ("tensor=2,pipeline=2,balance=parameters", 4),
]


@pytest.mark.parametrize("name", ["gpt", "convolutions"])
@pytest.mark.parametrize("strategy", ONE_DEVICE)
def test_one_device_is_exact_in_float64(strategy: str, name: str) -> None:
    if name == "convolutions" and strategy == "recompute,single":
        strategy = "recompute,unit=Conv2d,single"
    found = on_ranks(1, by_strategy, name, strategy)
    assert found.device.startswith(ON)
    assert distance(found, by_hand(name)) < 1e-9


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_is_exact_in_float64(accumulate: int) -> None:
    settings = {"accumulate": accumulate}
    found = on_ranks(1, by_strategy, "gpt", "single", torch.float64, settings)
    assert distance(found, by_hand("gpt")) < 1e-9


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "normed", "gpt"])
def test_one_device_in_float32_differs_as_rounding_does(name: str) -> None:
    exact, rounded = by_hand(name, torch.float32), by_hand(name, torch.float32, nudge=2.0**-23)
    found = on_ranks(1, by_strategy, name, "single", torch.float32)
    assert distance(found, exact) <= 20 * distance(rounded, exact)


@pytest.mark.parametrize(("strategy", "ranks"), SEVERAL)
def test_several_devices_are_exact_in_float64(strategy: str, ranks: int) -> None:
    found = on_ranks(ranks, by_strategy, "gpt", strategy)
    assert distance(found, by_hand("gpt")) < 1e-9


def test_batchnorm_of_all_ranks_is_that_of_one_device() -> None:
    settings = {"sync_batchnorm": True}
    found = on_ranks(2, by_strategy, "normed", "ddp", torch.float64, settings)
    assert distance(found, by_hand("normed")) < 1e-9


def test_dataparallel_on_two_devices_is_exact_in_float64() -> None:
    require_cuda("it has one device")
    found = on_ranks(1, by_strategy, "gpt", "dataparallel", devices=2)
    assert distance(found, by_hand("gpt")) < 1e-9
