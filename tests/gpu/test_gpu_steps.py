"""Steps on a GPU: no wait for the device, pinned batches, precision, compile and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_worlds import (
    BATCH,
    ON,
    by_hand,
    by_strategy,
    distance,
    loss_of,
    make,
    on_ranks,
    require_cuda,
    samples,
)
from host_reads import HostReads
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import shoal
from shoal.run.supervised import supervised

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls of CUDA that wait; the profiler itself calls cudaDeviceSynchronize at its end."""


def steps(strategy: str, watched: Any, settings: Any = None, clips: bool = True) -> None:
    """Take two steps of warm-up, and two in the context `watched`."""
    # To skip steps that are not finite, the host must look at numbers.
    settings = {"guards": False, "nonfinite": "ignore", **(settings or {})}
    run = shoal.init(strategy, announce=lambda _: None, **settings)
    model = make("gpt", torch.float32).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples("gpt"), BATCH, pin_memory=ON == "cuda")
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    batches = list(loader)

    def step(batch: Any) -> None:
        x, y = run.to_device(batch)
        optimizer.zero_grad()
        run.forward_backward(supervised(loss_of, model), x, y)
        if clips:
            run.clip_gradients(1.0)
        optimizer.step()

    for batch in batches[:2]:
        step(batch)
    if ON == "cuda":
        torch.cuda.synchronize()
    with watched:
        for batch in batches[2:]:
            step(batch)


class NoWait:
    """Makes torch raise where an operation waits for the device."""

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


class Waits:
    """Counts calls of CUDA that wait for the device, by torch's profiler.

    Attributes: count: in the context.
    """

    def __init__(self) -> None:
        self.count = 0
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def __enter__(self) -> None:
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        names = [event.name for event in self._profile.events()]
        self.count = sum(map(names.count, WAITS))


def waits_of(strategy: str, settings: Any) -> int:
    if ON != "cuda":
        with_reads = HostReads()
        steps(strategy, with_reads, settings)
        return sum(with_reads.places.values())
    steps(strategy, NoWait(), settings)
    seen = Waits()
    steps(strategy, seen, settings)
    return seen.count


@pytest.mark.parametrize("strategy", ["single", "ddp", "recompute,single", "dataparallel"])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_a_step_on_one_device_never_waits_for_it(strategy: str, settings: Any) -> None:
    assert on_ranks(1, waits_of, strategy, settings) == 0


def waits_to_skip(strategy: str) -> int:
    seen = Waits()
    steps(strategy, seen, {"nonfinite": "skip"}, clips=False)
    return seen.count


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3"])
def test_a_step_that_may_be_skipped_waits_once(strategy: str) -> None:
    require_cuda("nothing waits for it")
    assert on_ranks(1, waits_to_skip, strategy) == 2  # in two steps


def waits_on_ranks(strategy: str) -> dict[str, int]:
    """Return the reads of numbers on this rank; torch raises where one waits for a GPU."""
    reads = HostReads()
    if ON == "cuda":
        steps(strategy, NoWait(), clips=False)
    else:
        steps(strategy, reads, clips=False)
    return dict(reads.places)


@pytest.mark.parametrize("strategy", ["ddp,bucket_mb=0.001", "zero1", "zero2", "zero3", "tensor=2"])
def test_a_step_on_two_devices_never_waits_for_them(strategy: str) -> None:
    places = on_ranks(2, waits_on_ranks, strategy)
    over_the_cpu = {"axis.py:sum_of_host_numbers", "lockstep.py:_is_same_on_all_ranks"}
    assert places.keys() <= over_the_cpu | {"lockstep.py:unused"}


def pinned_batches(workers: int) -> list[bool]:
    run = shoal.init("single", announce=lambda _: None)
    model = make("gpt").to(run.device)
    loader = DataLoader(samples("gpt"), BATCH, pin_memory=True, num_workers=workers)
    _, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    moved = [x.device == run.device for batch in loader for x in batch]
    loader.device = None  # as the batches are before they are moved
    return [*moved, *(x.is_pinned() for batch in loader for x in batch)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_from_pinned_memory(workers: int) -> None:
    require_cuda("there is no pinned memory")
    assert all(on_ranks(1, pinned_batches, workers))


def sizes_of_offload(strategy: str) -> tuple[list[str], int, int]:
    """Return the devices of the shards, and the bytes on the GPU between steps and of the model."""
    run = shoal.init(strategy, announce=lambda _: None)
    # cuBLAS takes 32 MiB for itself in the first product of each thread.
    torch.ones(4, 4, device=run.device, requires_grad=True).mm(
        torch.ones(4, 4, device=run.device)
    ).sum().backward()
    before = torch.cuda.memory_allocated() if ON == "cuda" else 0
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(run.device)
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    for _ in range(2):
        x = torch.randn(4, 512, device=run.device)
        run.forward_backward(lambda x: model(x).square().mean(), x)
        optimizer.step()
        optimizer.zero_grad()
    kinds = {parameter.device.type for parameter in run.parameters().values()}
    held = torch.cuda.memory_allocated() - before if ON == "cuda" else 0
    return sorted(kinds), held, size


@pytest.mark.parametrize("strategy", ["zero2,offload=true", "zero3,offload=true"])
def test_offload_keeps_parameters_and_states_in_memory_of_the_cpu(strategy: str) -> None:
    kinds, held, size = on_ranks(1, sizes_of_offload, strategy)
    assert kinds == ["cpu"]
    assert held < size / 2


def losses_of(precision: str, strategy: str) -> tuple[list[float], set[str]]:
    """Return the losses of ten steps on one batch, and the dtypes of the layers' outputs."""
    quiet: Any = {"announce": lambda _: None, "guards": False}
    run = shoal.init(strategy, precision=precision, **quiet)  # type: ignore[arg-type]
    model = make("perceptron", torch.float32).to(run.device)
    dtypes = set()
    model[0].register_forward_hook(lambda _m, _i, output: dtypes.add(str(output.dtype)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer = run.prepare(model, optimizer)
    x, y = (tensor[:BATCH].float() for tensor in samples("perceptron").tensors)
    x, y = run.to_device((x, y.long()))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = run.forward_backward(lambda x, y: loss_of(model(x).float(), y), x, y)
        optimizer.step()
        losses.append(loss.item())
    return losses, dtypes


@pytest.mark.parametrize("strategy", ["single", "zero2,offload=true"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_half_precision_trains(precision: str, dtype: str, strategy: str) -> None:
    losses, dtypes = on_ranks(1, losses_of, precision, strategy)
    assert losses[-1] < losses[0]
    assert dtypes == {f"torch.{dtype}"}


def overflowed() -> list[bool]:
    """Return for a step that overflows in fp16, and for good ones, if it moved the weights.

    The first good ones may still find the loss scale too large.
    """
    run = shoal.init("single", precision="fp16", announce=lambda _: None)
    model = nn.Linear(4, 3).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    moved = []
    for factor in (1e30, 1.0, 1.0, 1.0, 1.0):
        before = model.weight.detach().clone()
        x, y = run.to_device((torch.ones(4, 4) * factor, torch.zeros(4, dtype=torch.int64)))
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: loss_of(model(x).float(), y), x, y)
        optimizer.step()
        moved.append(not torch.equal(before, model.weight))
    return moved


def test_a_step_that_overflows_in_fp16_is_skipped() -> None:
    first, *_, last = on_ranks(1, overflowed)
    assert (first, last) == (False, True)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_compiled_models_are_exact_in_float64(strategy: str) -> None:
    found = on_ranks(1, by_strategy, "perceptron", strategy, torch.float64, {"compile": True})
    assert distance(found, by_hand("perceptron")) < 1e-9
