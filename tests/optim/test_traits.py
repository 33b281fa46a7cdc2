"""Which optimizers may step shards and stages: torch's by a list, others by what they declare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_step import assert_same
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from shoal.errors import StrategyRefused
from shoal.optim.traits import (
    ELEMENTWISE_OPTIMIZERS,
    PARAMETERWISE_OPTIMIZERS,
    is_elementwise,
    is_parameterwise,
)
from shoal.testing import world
from tests.harness.in_turn import in_turn

NEITHER = {"LBFGS"}
ARGUMENTS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}}
MATRIX = torch.arange(24.0, dtype=torch.float64).sin().reshape(4, 6)


def stepped(name: str, values: list[Tensor], rows: slice = slice(None)) -> list[Tensor]:
    """Return values after three steps of an optimizer of torch."""
    parameters = [nn.Parameter(value[rows].clone()) for value in values]
    optimizer = getattr(torch.optim, name)(parameters, **ARGUMENTS.get(name, {}))
    for step in range(3):
        for index, parameter in enumerate(parameters):
            gradient = (MATRIX + step + index).cos()[rows]
            parameter.grad = gradient.to_sparse(1) if name == "SparseAdam" else gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_every_optimizer_of_torch_is_in_one_list() -> None:
    names = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    listed = [*ELEMENTWISE_OPTIMIZERS, *PARAMETERWISE_OPTIMIZERS, *NEITHER]
    assert sorted(listed) == sorted(names - {"Optimizer"})


@pytest.mark.parametrize("name", ELEMENTWISE_OPTIMIZERS)
def test_an_elementwise_optimizer_steps_halves_as_it_steps_the_whole(name: str) -> None:
    assert is_elementwise(getattr(torch.optim, name))
    (whole,) = stepped(name, [MATRIX])
    halves = [*stepped(name, [MATRIX], slice(0, 2)), *stepped(name, [MATRIX], slice(2, 4))]
    assert (whole - MATRIX).abs().max() > 0
    torch.testing.assert_close(torch.cat(halves), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*ELEMENTWISE_OPTIMIZERS, *PARAMETERWISE_OPTIMIZERS])
def test_a_parameterwise_optimizer_steps_one_parameter_as_beside_another(name: str) -> None:
    assert is_parameterwise(getattr(torch.optim, name))
    first, _ = stepped(name, [MATRIX, MATRIX.flip(0)])
    (alone,) = stepped(name, [MATRIX])
    assert torch.equal(first, alone)


class Decay(Optimizer):
    """An optimizer of a script, which says nothing of itself; it counts its steps in its class."""

    steps = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        type(self).steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad + 0.01 * parameter, alpha=group["lr"])


class Declared(Decay):
    elementwise = True


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


X = torch.arange(16.0, dtype=torch.float64).sin().reshape(4, 4)


def trained(strategy: str, make: Callable[[Any], Optimizer]) -> tuple[str, dict[str, Tensor], int]:
    """Return a refusal, or the weights after three steps; and the steps of the optimizer."""
    Decay.steps = Declared.steps = 0
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    optimizer = make((model := net()).parameters())
    # A schedule wraps the optimizer's step.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    try:
        model, optimizer = run.prepare(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            run.forward_backward(lambda x: model(x).square().mean(), run.share(X))
            optimizer.step()
    except StrategyRefused as refusal:
        return str(refusal), {}, 0
    return "", run.weights(), getattr(type(optimizer), "steps", 0)


def make_muon(params: Any) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2])


def refusals(strategy: str) -> list[str]:
    def with_the_rest_frozen(params: Any) -> Optimizer:
        matrices = []
        for parameter in params:
            if parameter.ndim == 2:
                matrices.append(parameter)
            else:
                parameter.requires_grad_(False)
        return make_muon(matrices)

    return [trained(strategy, make)[0] for make in (Decay, with_the_rest_frozen, torch.optim.LBFGS)]


def test_an_optimizer_that_may_look_at_whole_tensors_is_refused_on_shards() -> None:
    for results in world.run(2, in_turn, refusals, ("zero1",), ("zero3",), ("tensor=2",)):
        for script, muon, lbfgs in results:
            for name, text in (("Decay", script), ("Muon", muon), ("LBFGS", lbfgs)):
                assert text.startswith(f"{name} cannot step the shards of "), text
                assert "Use ddp, or another optimizer" in text
            assert "say so before prepare: Decay.elementwise = True" in script
            assert "say so" not in muon + lbfgs


def test_a_pipeline_refuses_an_optimizer_that_may_look_at_all_parameters() -> None:
    for script, muon, lbfgs in world.run(2, refusals, "pipeline=2"):
        assert muon == ""
        for name, text in (("Decay", script), ("LBFGS", lbfgs)):
            assert text.startswith(f"{name} cannot step the stages of a pipeline one by one"), text
        assert "say so before prepare: Decay.parameterwise = True" in script


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "tensor=2", "pipeline=2"])
def test_an_optimizer_that_declares_it_is_stepped_as_often_as_the_script_does(
    strategy: str,
) -> None:
    _, expected, _ = trained("single", Declared)
    for refusal, weights, steps in world.run(2, trained, strategy, Declared):
        assert (refusal, steps) == ("", 3)
        assert_same(weights, expected)


class Signed(Optimizer):
    """Counts its steps in a group, which has a text too, and may have a factor beside it."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1, mode: str = "plain", scale: float = 1.0):
        super().__init__(params, {"lr": lr, "mode": mode, "steps": 0})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = self.scale * group["lr"] / (1 + group["steps"])
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    is_signed = group["mode"] == "sign"
                    parameter.sub_(
                        parameter.grad.sign() if is_signed else parameter.grad, alpha=rate
                    )


def on_servers() -> list[tuple[str, dict[str, Tensor], int]]:
    class Inner(Signed):
        pass

    makers: list[Callable[[Any], Optimizer]] = [
        lambda params: Signed(params, mode="sign"),
        lambda params: Signed(params, scale=2.0),
        Inner,
    ]
    return [trained("server=2", make) for make in makers]


def test_servers_build_an_optimizer_of_its_groups_or_refuse_it() -> None:
    _, expected, _ = trained("single", lambda params: Signed(params, mode="sign"))
    for (refusal, weights, _), (scaled, *_), (inner, *_) in world.run(2, on_servers):
        assert refusal == ""
        assert_same(weights, expected)
        assert "would have other values than here of: scale" in scaled
        assert "Put it at the top of a module" in inner
