"""The same few steps twice: by hand in one process, and through Shoal on many ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.data.loader import ShareLoader
from shoal.data.nest import nested
from shoal.data.seeds import stream
from shoal.errors import StrategyRefused, UsageError
from shoal.proof.differences import differences
from shoal.run import begin
from shoal.strategies.base import LossFunction, refuse_unless_scalar


@dataclass(frozen=True)
class Experiment:
    """What is trained. The functions stand at the top of a module: every rank imports them."""

    model_fn: Callable[[], nn.Module]
    loader_fn: Callable[[], DataLoader]
    """Its batches are the global ones."""
    loss_fn: LossFunction
    steps: int = 5


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Attributes:
        errors: of losses, gradients and weights, by what they belong to.
        notes: what was said about this model before the first step.
        refusal: the message, where the strategy did not take the model.
    """

    errors: dict[str, float]
    notes: list[str]
    refusal: str | None = None


def by_hand(experiment: Experiment, file: Path) -> None:
    """The reference, written to `file`: a plain loop over whole batches in one process."""
    _see_no_gpu()
    torch.manual_seed(0)
    model = experiment.model_fn().double()
    optimizer = _sgd(model)
    torch.manual_seed(stream(0, 0))  # dropout draws what rank 0 draws
    losses: list[Tensor] = []
    gradients: list[dict[str, Tensor | None]] = []
    for *inputs, target in _steps(experiment, ShareLoader(experiment.loader_fn(), rank=0, ranks=1, seed=0)):
        optimizer.zero_grad()
        value = experiment.loss_fn(model(*inputs), target)
        refuse_unless_scalar(value[0] if isinstance(value, tuple) else value)
        loss = value[0] / value[1] if isinstance(value, tuple) else value
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.save({"losses": losses, "gradients": gradients, "weights": weights}, file)


def with_shoal(experiment: Experiment, strategy: str, accumulate: int, reference: Path) -> Found:
    """The same loop with the five lines changed, compared with the reference as it goes. Collective."""
    _see_no_gpu()
    expected: Any = torch.load(reference, weights_only=True, mmap=True)
    said: list[str] = []
    try:
        run = begin(strategy, accumulate=accumulate, precision="fp64", announce=said.append)
        model = experiment.model_fn().double()
        model, optimizer, loader = run.prepare(model, _sgd(model), experiment.loader_fn())
    except (StrategyRefused, UsageError) as refusal:
        return Found({}, [], str(refusal))
    errors: dict[str, float] = {}
    for step, (*inputs, target) in enumerate(_steps(experiment, loader)):
        optimizer.zero_grad()
        loss = run.forward_backward(experiment.loss_fn, model, *inputs, target)
        expected_loss = expected["losses"][step]
        errors[f"loss of step {step}"] = ((loss - expected_loss).abs() / expected_loss.abs().clamp(min=1e-30)).item()
        gradients = differences(expected["gradients"][step], run.gradients()) if run.in_step else {}
        for name, error in gradients.items():
            errors[f"gradient of {name} in step {step}"] = error
        optimizer.step()
    for name, error in differences(expected["weights"], run.weights()).items():
        errors[f"{name} after {experiment.steps} steps"] = error
    return Found(errors, [line.removeprefix("note: ") for line in said if line.startswith("note: ")])


def _see_no_gpu() -> None:
    """float64 is slow on most GPUs, and the order of their sums changes from run to run."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _steps(experiment: Experiment, loader: ShareLoader) -> Iterator[Any]:
    """As many batches as there are steps, over several epochs if need be, in float64."""
    left = experiment.steps
    while left > 0:
        before = left
        for batch in loader:
            yield _double(batch)
            left -= 1
            if left == 0:
                return
        if left == before:
            raise UsageError("the loader gives no batch.")


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return nested(value, _double)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)
