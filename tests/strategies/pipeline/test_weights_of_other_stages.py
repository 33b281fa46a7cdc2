"""A script that reads weights of other stages between steps is told so; it may write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import StrategyRefused, UsageError
from shoal.testing import world


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
    ).double()


def loader() -> Any:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


def told(function: Callable[[], Any], kind: type[Exception] = UsageError) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    return ""


def averages(mean: nn.Module, params: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """Ways to average weights, by name."""
    means = [p.detach() for p in mean.parameters()]

    def each(function: Callable[[Tensor, Tensor], Any]) -> Callable[[], Any]:
        return lambda: [function(m, p) for m, p in zip(means, params, strict=True)]

    return {
        "lerp": each(lambda m, p: m.lerp_(p.detach(), 0.1)),
        "add": each(lambda m, p: m.mul_(0.9).add_(p, alpha=0.1)),
        "data": each(lambda m, p: m.copy_(p.data)),
        "operator": each(lambda m, p: 0.9 * m + 0.1 * p),
        "foreach": lambda: torch._foreach_lerp_(means, [p.data for p in params], 0.1),
        "clone": lambda: torch.cat([p.clone().flatten() for p in params]),
        "number": each(lambda m, p: p.abs().max().item()),
        "norm": lambda: torch.stack([p.norm() for p in params]),
    }


def reads_between_steps() -> dict[str, str]:
    run = shoal.init("pipeline=2", announce=lambda _: None)
    model = layers()
    mean = copy.deepcopy(model)
    swa = torch.optim.swa_utils.AveragedModel(model)
    held = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = run.prepare(model, optimizer, loader())

    def compute_loss(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    for (x,) in data:
        optimizer.zero_grad()
        run.forward_backward(compute_loss, x)
        optimizer.step()
    found = {}
    with torch.no_grad():
        for source, params in {"model": list(model.parameters()), "held": held}.items():
            for name, function in averages(mean, params).items():
                found[f"{name} of {source}"] = told(function)
        found["AveragedModel"] = told(lambda: swa.update_parameters(model))
        found["deepcopy"] = told(lambda: copy.deepcopy(model)(torch.ones(1, 4)))
    return found


def test_every_read_of_a_weight_of_another_stage_is_an_error() -> None:
    for found in world.run(2, reads_between_steps):
        for name, text in found.items():
            assert "on another rank" in text, name
            assert "run.weights()" in text, name


def trained(strategy: str) -> dict[str, Tensor]:
    """Train, and write weights between steps on all ranks."""
    run = shoal.init(strategy, announce=lambda _: None)
    model = layers()
    params, teacher = list(model.parameters()), copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = run.prepare(model, optimizer, loader())

    def compute_loss(x: Tensor) -> Tensor:
        penalty = sum((p.square().sum() for p in params), torch.zeros((), dtype=x.dtype))
        loss: Tensor = model(x).square().mean() + step / 3 * F.mse_loss(model(-x), teacher(x))
        return loss + 0.1 * penalty

    def other_loss(x: Tensor) -> Tensor:  # a batch of the same shape goes another way
        loss: Tensor = model(x.detach() * 2).abs().mean()
        return loss

    for step, (x,) in enumerate(data):  # noqa: B007 - the loss reads it
        for loss_fn in (compute_loss, other_loss):
            model.zero_grad()
            run.forward_backward(loss_fn, x)
            optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
                p.data.mul_(0.5)
                p.mul_(p.detach().abs() > 0.01)
                p *= 1.5
            torch._foreach_mul_(list(model.parameters()), 0.9)
            torch._foreach_add_(list(model.parameters()), list(model.parameters()))
        assert sum(p.numel() for p in model.parameters()) == 45
        assert all(p.requires_grad for p in model.parameters())
    return {name: value.clone() for name, value in run.weights().items()}


def test_weights_are_written_in_place_on_all_ranks_and_read_in_the_loss() -> None:
    expected = trained("single")
    for weights in world.run(2, trained, "pipeline=2"):
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def differentiates_inside(kind: str) -> str:
    run = shoal.init("pipeline=2", announce=lambda _: None)
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = run.prepare(model, optimizer, loader())

    def compute_loss(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        out = model(x).sum()
        wanted = x if kind == "inputs" else list(model.parameters())
        slopes = torch.autograd.grad(out, wanted, create_graph=True)
        return sum((slope.square().mean() for slope in slopes), out * 0)

    def take_step() -> None:  # not tried, for a gradient of all weights couples the samples
        run.forward_backward(compute_loss, *next(iter(data)), reduction="ranks")

    return told(take_step, StrategyRefused)


def both_kinds() -> list[str]:
    return [differentiates_inside("inputs"), differentiates_inside("parameters")]


def test_a_gradient_inside_of_the_loss_is_refused_by_name() -> None:
    for texts in world.run(2, both_kinds):
        for text in texts:
            assert "a gradient is taken inside compute_loss" in text
            assert "Use ddp or zero" in text
