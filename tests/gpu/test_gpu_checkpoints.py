"""Checkpoints and weights that one kind of device has written and another one reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_worlds import BATCH, ON, loss_of, make, on_ranks, samples
from torch import Tensor
from torch.utils.data import DataLoader

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world

State = tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]


def to_cpu(values: Any) -> Any:
    return {
        name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().cpu().clone()
        for name, v in values.items()
    }


def train(
    strategy: str, take: int, state: State | None, noise: bool = False
) -> tuple[State, dict[str, Tensor], list[str]]:
    """Take steps from a state, or from the beginning. Return the state, the weights and notes."""
    run = shoal.init(strategy, announce=lambda _: None)
    model = make("gpt").to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(samples("gpt"), BATCH))
    notes = [] if state is None else run.load_state(*state)
    loss = supervised(loss_of, model)

    def noisy(x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = loss(x, y)
        return value * (1 + torch.rand((), device=value.device)) if noise else value

    for number, batch in enumerate(loader, 1):
        x, y = run.to_device(batch)
        optimizer.zero_grad()
        run.forward_backward(noisy, x, y)
        optimizer.step()
        if number == take:  # a loop that is left has ended the epoch
            tensors, info, private = run.state()
            break
    return (to_cpu(tensors), info, to_cpu(private)), to_cpu(run.weights()), notes


def on_cpu(ranks: int, function: Any, *args: Any) -> Any:
    return world.run(ranks, function, *args, timeout_s=120)[0]


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("strategy", ["single", "ddp", "server=1"])
def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(strategy: str) -> None:
    _, expected, _ = on_ranks(1, train, strategy, 4, None, True)
    state, _, _ = on_ranks(1, train, strategy, 2, None, True)
    _, resumed, notes = on_ranks(1, train, strategy, 2, state, True)
    assert notes == []
    assert differ(resumed, expected) == 0


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_run_of_the_cpu_goes_on_on_a_gpu(strategy: str) -> None:
    _, expected, _ = on_cpu(1, train, strategy, 4, None)
    state, _, _ = on_cpu(1, train, strategy, 2, None)
    _, resumed, notes = on_ranks(1, train, strategy, 2, state)
    assert len(notes) == (ON == "cuda")
    assert differ(resumed, expected) < 1e-9


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_run_of_a_gpu_goes_on_on_the_cpu(strategy: str) -> None:
    _, expected, _ = on_cpu(1, train, strategy, 4, None)
    state, _, _ = on_ranks(1, train, strategy, 2, None)
    _, resumed, notes = on_cpu(1, train, strategy, 2, state)
    assert len(notes) == (ON == "cuda")
    assert differ(resumed, expected) < 1e-9


def saved(path: Path) -> None:
    run = shoal.init("single", announce=lambda _: None)
    model = make("gpt").to(run.device)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.save(path)


def test_weights_that_a_gpu_has_saved_are_read_without_one(tmp_path: Path) -> None:
    on_ranks(1, saved, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True, map_location="cpu")
    assert differ(weights, make("gpt").state_dict()) == 0


def evaluated(strategy: str) -> dict[str, float]:
    run = shoal.init(strategy, announce=lambda _: None)
    model = make("gpt").to(run.device)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def sums(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(model(x), y) * len(x)}

    return run.evaluate(sums, DataLoader(samples("gpt"), BATCH))


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("zero3", 2)])
def test_an_evaluation_gives_the_sums_of_the_cpu(strategy: str, ranks: int) -> None:
    found = on_ranks(ranks, evaluated, strategy)
    expected = on_cpu(1, evaluated, "single")
    assert found["samples"] == expected["samples"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
