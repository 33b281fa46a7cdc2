"""Optimizers of torch step this rank's shards as plain tensors, with one device's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "fused SGD": ("SGD", {"momentum": 0.9, "fused": True}),
    "amsgrad": ("Adam", {"amsgrad": True, "foreach": True}),
    "fused AdamW": ("AdamW", {"fused": True}),
    "fused Adagrad": ("Adagrad", {"fused": True}),
    **{name: (name, {}) for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")},
    "RMSprop": ("RMSprop", {"momentum": 0.5, "centered": True}),
}


def batches() -> DataLoader[Any]:
    torch.manual_seed(1)
    samples = TensorDataset(torch.randn(24, 6).double(), torch.randint(0, 4, (24,)))
    return DataLoader(samples, batch_size=8)


def prepared(strategy: str, name: str, guards: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None, guards=guards)
    # Under tensor the norm stays whole beside slices.
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
    model.append(nn.Linear(6, 4)).double()
    kind, options = OPTIMIZERS[name]
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    return run, *run.prepare(model, optimizer, batches())


def train(run: Any, model: Any, optimizer: Any, loader: Any) -> dict[str, Tensor]:
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.step()
    return {name: value.clone() for name, value in run.weights().items()}


def resumed(strategy: str, name: str) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Return the weights after an epoch and after a second one, which a new run trains, and what is
    wrong with the optimizer's state.
    """
    run, *parts = prepared(strategy, name)
    first = train(run, *parts)
    optimizer = parts[1]
    wrong = state_of_no_parameter(optimizer)
    state = run.state_dict()
    run, *parts = prepared(strategy, name)
    run.load_state_dict(state)
    second = train(run, *parts)
    return [first, second], wrong + state_of_no_parameter(parts[1])


def state_of_no_parameter(optimizer: torch.optim.Optimizer) -> list[str]:
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    wrong = [f"{key.shape} is no parameter" for key in optimizer.state if id(key) not in parameters]
    for parameter, values in optimizer.state.items():
        wrong += [
            f"{key} of a shard is a {type(value).__name__}"
            for key, value in values.items()
            if isinstance(value, Tensor) and value.dim()
            if isinstance(value, DTensor) != isinstance(parameter, DTensor)
        ]
    return wrong


def all_resumed(strategy: str) -> dict[str, Any]:
    """Train by every optimizer on shards, and on slices by those with other numbers of tensors."""
    names = ("momentum", "fused AdamW", "ASGD") if "tensor" in strategy else OPTIMIZERS
    return {name: resumed(strategy, name) for name in names}


@pytest.mark.parametrize("strategy", [pytest.param("zero3", marks=pytest.mark.slow), "tensor=2"])
def test_each_elementwise_optimizer_steps_shards_and_resumes_as_on_one_device(
    strategy: str,
) -> None:
    expected = all_resumed("single")
    for found in world.run(2, all_resumed, strategy):
        for name, (epochs, wrong) in found.items():
            assert wrong == [], name
            for weights, whole in zip(epochs, expected[name][0], strict=True):
                torch.testing.assert_close(weights, whole, rtol=0, atol=1e-10)


def centred(strategy: str, name: str) -> dict[str, Tensor]:
    """Train with gradients less their means over rows, which ranks have summed in part."""
    run, model, optimizer, loader = prepared(strategy, name)
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        for p in model.parameters():
            p.grad = p.grad - p.grad.mean(0, keepdim=True)
        optimizer.step()
    return run.weights()


def all_centred(strategy: str) -> dict[str, dict[str, Tensor]]:
    return {name: centred(strategy, name) for name in ("fused SGD", "fused AdamW", "momentum")}


def test_a_gradient_that_the_script_computes_is_divided_as_its_parameter() -> None:
    expected = all_centred("single")
    for results in world.run(2, in_turn, all_centred, ("zero3",), ("tensor=2",)):
        for found in results:
            for name, weights in expected.items():
                torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-10)


def whole_values() -> list[str]:
    said = []
    for place in ("gradient", "state"):
        run, model, optimizer, loader = prepared("zero1", "fused AdamW", guards=True)
        train(run, model, optimizer, loader)
        p = model[0].weight
        p.grad = torch.ones_like(p)
        whole = torch.ones(p.shape).double()
        if place == "gradient":
            p.grad = whole
        else:
            optimizer.state[p]["exp_avg"] = whole
        with pytest.raises(UsageError) as error:
            optimizer.step()
        said.append(str(error.value))
    return said


@pytest.mark.slow
def test_whole_values_beside_a_shard_are_refused() -> None:
    for said in world.run(2, whole_values):
        assert all("that part was combined with a whole tensor" in words for words in said), said


def fails_once(strategy: str) -> dict[str, Tensor]:
    """Train with a step that ends after its first group, and is made again."""
    run, model, _, loader = prepared(strategy, "momentum")
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1:].parameters()]}]
    optimizer = run.prepare(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.param_groups[1]["lr"] = "0.1"
        if number == 0:
            with pytest.raises(TypeError):
                optimizer.step()
            run.state_dict()
        optimizer.param_groups[1]["lr"] = 0.1
        optimizer.step()
    return run.weights()


def test_a_step_that_failed_is_made_again_with_the_momentum_that_it_had_begun() -> None:
    expected = fails_once("single")
    for results in world.run(2, in_turn, fails_once, ("zero1",), ("tensor=2",)):
        for found in results:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def keeps_a_graph() -> str:
    run, model, optimizer, loader = prepared("tensor=2", "momentum")
    loss = sum(p.square().sum() for p in model.parameters() if isinstance(p, DTensor))
    train(run, model, optimizer, loader)
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def test_a_graph_that_has_kept_parameters_knows_of_the_step() -> None:
    assert "modified by an inplace operation" in world.run(2, keeps_a_graph)[0]
