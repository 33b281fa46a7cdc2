"""Functions that ranks of a pipeline run in tests: train a few steps, and return everything that
could differ from one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ShoalError
from shoal.run import init_with_place
from shoal.run.supervised import LossFunction, supervised
from shoal.verification.trajectory import Experiment
from tests.matrix import cases


@dataclass
class RankResult:
    """The results of one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    correct: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    output: Tensor | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)


def train(name: str, strategy: str, steps: int = 5) -> RankResult:
    """Train an experiment of the verification matrix, with AdamW and clipping."""
    result = RankResult()
    experiment = cases.EXPERIMENTS[name]
    run = init_with_place(strategy, precision="fp64", announce=result.summary.append)
    model = experiment.model_fn().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, experiment.loader_fn())
    batches = [batch for _ in range(2) for batch in loader][:steps]

    def compute_loss(*batch: Any) -> Any:
        *inputs, target = batch
        output = model(*inputs)
        return experiment.loss_fn(output, target), shoal.summed(_correct(output, target))

    for batch in batches:
        optimizer.zero_grad()
        loss, _ = run.forward_backward(compute_loss, *batch)
        result.losses.append(loss.item())
        assert run.totals is not None
        result.correct += run.totals[3].item()
        result.norms.append(run.clip_gradients(0.5).item())
        optimizer.step()
    result.sums = run.evaluate(
        lambda *batch: {"size": model(*batch[:-1]).abs().sum()}, experiment.loader_fn()
    )
    result.output = model(*batches[0][:-1]).detach()
    result.weights = {name: value.clone() for name, value in run.weights().items()}
    return result


def _correct(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).sum().view(1)


def alike(one: RankResult, other: RankResult) -> None:
    """Assert that two ranks have the same results, to 1e-10."""
    for kind in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(one, kind)),
            torch.tensor(getattr(other, kind)),
            rtol=1e-10,
            atol=0,
            msg=kind,
        )
    assert one.correct == other.correct
    torch.testing.assert_close(one.sums["size"], other.sums["size"], rtol=1e-10, atol=0)
    if one.output is not None and other.output is not None and len(one.output) == len(other.output):
        torch.testing.assert_close(one.output, other.output, rtol=1e-9, atol=1e-11)
    assert set(one.weights) == set(other.weights)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-9, atol=1e-11)


def statistics(strategy: str, experiment: Experiment, prefix: str) -> dict[str, Tensor]:
    """Return the running statistics of the first BatchNorm after one step, all channels."""
    run = init_with_place(strategy, precision="fp64", announce=lambda _: None)
    model = experiment.model_fn().double()
    model, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), experiment.loader_fn()
    )
    *inputs, target = next(iter(loader))
    run.forward_backward(supervised(experiment.loss_fn, model), *inputs, target)
    return {name: value.clone() for name, value in run.weights().items() if name.startswith(prefix)}


def half(strategy: str, precision: Any, factor: float) -> tuple[list[float], dict[str, Tensor]]:
    """Train with less precision; return losses and final weights. A large factor makes gradients
    overflow in fp16.
    """
    experiment = cases.EXPERIMENTS["mlp"]
    run = init_with_place(strategy, precision=precision, announce=lambda _: None)
    model = experiment.model_fn()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), experiment.loader_fn()
    )
    losses = []
    for x, target in loader:
        optimizer.zero_grad()
        loss = run.forward_backward(
            supervised(Scaled(experiment.loss_fn, factor), model), x.float(), target
        )
        losses.append(loss.item())
        optimizer.step()
    return losses, {name: value.clone() for name, value in run.weights().items()}


@dataclass
class Scaled:
    """A loss times a number."""

    loss_fn: LossFunction
    factor: float

    def __call__(self, output: Any, target: Any) -> Any:
        return self.loss_fn(output, target) * self.factor


def refusal(strategy: str, compile: bool = False) -> str:
    """Return the message with which a pipeline refuses; empty if it does not."""
    try:
        run = init_with_place(strategy, announce=lambda _: None, compile=compile)
        model = cases.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, loader = run.prepare(model, optimizer, cases.image_loader())
        for x, target in loader:
            run.forward_backward(supervised(nn.functional.cross_entropy, model), x.float(), target)
    except ShoalError as error:
        return f"{type(error).__name__}: {error}"
    return ""
