"""The same few steps twice: by hand in one process, and through Shoal on many ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.data.loader import DistributedBatchLoader
from shoal.data.seeds import derive_seed
from shoal.data.tree_map import tree_map
from shoal.errors import StrategyRefused, UsageError
from shoal.run import init_with_place
from shoal.strategies.base import LossFunction, check_scalar_loss
from shoal.verification.buffer_check import are_read, changed, copied
from shoal.verification.differences import differences


@dataclass(frozen=True)
class Experiment:
    """What is trained. The functions stand at the top of a module: every rank imports them."""

    model_fn: Callable[[], nn.Module]
    loader_fn: Callable[[], DataLoader]
    """Its batches are the global ones."""
    loss_fn: LossFunction
    steps: int = 5


@dataclass(frozen=True)
class RankReport:
    """What one rank found.

    Attributes:
        errors: of losses, gradients, weights and buffers, by what they belong to.
        notes: what was said about this model before the first step.
        by_rank: the buffers among `errors` that each rank's samples change.
        read: training reads what was written there.
        refusal: the message, where the strategy did not take the model.
    """

    errors: dict[str, float]
    notes: list[str]
    by_rank: frozenset[str] = frozenset()
    buffers_read: bool = False
    refusal: str | None = None


def run_reference(experiment: Experiment, file: Path) -> None:
    """The reference, written to `file`: a plain loop over whole batches in one process."""
    _hide_gpu()
    torch.manual_seed(0)
    model = experiment.model_fn().double()
    optimizer, before = _sgd(model), copied(model)
    torch.manual_seed(derive_seed(0, 0))  # dropout draws what rank 0 draws
    losses: list[Tensor] = []
    gradients: list[dict[str, Tensor | None]] = []
    norms: list[Tensor] = []
    for *inputs, target in _steps(
        experiment, DistributedBatchLoader(experiment.loader_fn(), rank=0, ranks=1, seed=0)
    ):
        optimizer.zero_grad()
        loss = _loss(experiment, model, inputs, target)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
        norms.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        )
        optimizer.step()
    expected = {
        "losses": losses,
        "gradients": gradients,
        "norms": norms,
        "weights": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "buffers": copied(model),
        "changed": changed(model, before),
    }
    expected["read"] = bool(expected["changed"]) and are_read(
        model, before, lambda: _loss(experiment, model, inputs, target)
    )
    torch.save(expected, file)


def _loss(experiment: Experiment, model: nn.Module, inputs: list[Any], target: Any) -> Tensor:
    value = experiment.loss_fn(model(*inputs), target)
    check_scalar_loss(value[0] if isinstance(value, tuple) else value)
    return value[0] / value[1] if isinstance(value, tuple) else value


def run_strategy(
    experiment: Experiment, strategy: str, accumulate: int, reference: Path
) -> RankReport:
    """The same loop with the five lines changed, compared with the reference as it goes.
    Collective.
    """
    _hide_gpu()
    expected: Any = torch.load(reference, weights_only=True, mmap=True)
    said: list[str] = []
    try:
        run = init_with_place(
            strategy, accumulate=accumulate, precision="fp64", announce=said.append
        )
        model = experiment.model_fn().double()
        model, optimizer, loader = run.prepare(model, _sgd(model), experiment.loader_fn())
    except (StrategyRefused, UsageError) as refusal:
        return RankReport({}, [], refusal=str(refusal))
    errors: dict[str, float] = {}
    for step, (*inputs, target) in enumerate(_steps(experiment, loader)):
        optimizer.zero_grad()
        loss = run.forward_backward(experiment.loss_fn, model, *inputs, target)
        errors[f"loss of step {step}"] = _relative(loss, expected["losses"][step])
        if run.is_synchronous:
            for name, error in differences(expected["gradients"][step], run.gradients()).items():
                errors[f"gradient of {name} in step {step}"] = error
            norm, expected_norm = run.clip_gradients(math.inf), expected["norms"][step]
            errors[f"norm of all gradients in step {step}"] = _relative(norm, expected_norm)
        optimizer.step()
    weights, after = run.weights(), f"after {experiment.steps} steps"
    for name, error in differences(expected["weights"], weights).items():
        errors[f"{name} {after}"] = error
    for name, error in differences(expected["buffers"], weights).items():
        errors[f"buffer {name} {after}"] = error
    split = run.world * accumulate > 1
    by_rank = frozenset(f"buffer {name} {after}" for name in expected["changed"] if split)
    notes = [line.removeprefix("note: ") for line in said if line.startswith("note: ")]
    return RankReport(errors, notes, by_rank, expected["read"])


def _relative(found: Tensor, expected: Tensor) -> float:
    """The error of one number."""
    return ((found - expected).abs() / expected.abs().clamp(min=1e-30)).item()


def _hide_gpu() -> None:
    """float64 is slow on most GPUs, and the order of their sums changes from run to run."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _steps(experiment: Experiment, loader: DistributedBatchLoader) -> Iterator[Any]:
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
    return tree_map(value, _double)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    """Two groups with settings of their own, so that a parameter in the wrong one is seen."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": trained[::2]},
        {"params": trained[1::2], "lr": 0.05, "weight_decay": 0},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]], lr=0.1, momentum=0.9, weight_decay=0.01
    )
