"""The conformance check of a strategy: the gradients and the weights of one process, to 1e-10 in float64.

A strategy's author writes one row in a table and calls `check_strategy`; the reference is a hand-written PyTorch loop
over whole batches, in the order that one rank would see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.data.loader import ShareLoader
from shoal.strategies.base import LossFunction
from shoal.testing import world

TOLERANCE = 1e-10
ZERO = 1e-5
Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """One model with data and a loss. The functions stand at module level: every rank imports them."""

    model_fn: Callable[[], nn.Module]
    dataset_fn: Callable[[], Dataset]
    loss_fn: LossFunction
    batch_size: int = 10
    steps: int = 5


@dataclass(frozen=True)
class Trajectory:
    """What a few steps of SGD with momentum leave behind."""

    losses: list[float]
    gradients: list[dict[str, Tensor | None]]
    weights: dict[str, Tensor]


def check_strategy(strategy: str, ranks: int, case: Case, accumulate: int = 1) -> None:
    """Raise AssertionError with the worst parameters unless `ranks` ranks train as one process does.

    Compared are every parameter's gradient in every step, every loss, and the weights at the end. Each difference is
    relative to the largest entry of the reference tensor.
    """
    reference = by_hand(case)
    for rank, found in enumerate(world.run(ranks, with_shoal, case, strategy, accumulate)):
        # Not `error > TOLERANCE`, which a NaN would pass.
        wrong = {name: error for name, error in _errors(reference, found) if not error <= TOLERANCE}
        worst = sorted(wrong.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} {error:.1e}" for name, error in worst)
        assert not wrong, f"{strategy} on rank {rank} of {ranks} differs from one process: {listed}"


def by_hand(case: Case) -> Trajectory:
    """The reference: a plain loop over whole batches in one process."""
    torch.manual_seed(0)
    model = case.model_fn().double()
    optimizer = _sgd(model)
    batches = ShareLoader(_loader(case), rank=0, ranks=1, seed=0)
    found = Trajectory([], [], {})
    while len(found.losses) < case.steps:
        for *inputs, target in batches:
            optimizer.zero_grad()
            value = case.loss_fn(model(*inputs), target)
            loss = value[0] / value[1] if isinstance(value, tuple) else value
            loss.backward()
            _record(found, loss, model)
            optimizer.step()
            if len(found.losses) == case.steps:
                break
    found.weights.update(_weights(model))
    return found


def with_shoal(case: Case, strategy: str, accumulate: int) -> Trajectory:
    """The same loop with the five lines changed, on one rank."""
    run = shoal.init(strategy, accumulate=accumulate, announce=_quiet)
    model = case.model_fn().double()
    model, optimizer, loader = run.prepare(model, _sgd(model), _loader(case))
    found = Trajectory([], [], {})
    while len(found.losses) < case.steps:
        for *inputs, target in loader:
            optimizer.zero_grad()
            loss = run.forward_backward(case.loss_fn, model, *inputs, target)
            _record(found, loss, model)
            optimizer.step()
            if len(found.losses) == case.steps:
                break
    found.weights.update(_weights(model))
    return found


def _sgd(model: nn.Module) -> torch.optim.SGD:
    # Not Adam: it divides a wrong scale away.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)


def _loader(case: Case) -> DataLoader:
    return DataLoader(case.dataset_fn(), batch_size=case.batch_size, shuffle=True)


def _record(found: Trajectory, loss: Tensor, model: nn.Module) -> None:
    found.losses.append(loss.item())
    found.gradients.append(
        {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _errors(reference: Trajectory, found: Trajectory) -> Iterator[tuple[str, float]]:
    for step, (a, b) in enumerate(zip(reference.losses, found.losses, strict=True)):
        yield f"loss of step {step}", abs(a - b) / max(abs(a), 1e-30)
    for step, (expected, given) in enumerate(zip(reference.gradients, found.gradients, strict=True)):
        for name, error in _differences(expected, given).items():
            yield f"gradient of {name} in step {step}", error
    for name, error in _differences(reference.weights, found.weights).items():
        yield f"{name} after {len(reference.losses)} steps", error


def _differences(expected: Tensors, given: Tensors) -> dict[str, float]:
    """Largest difference of each tensor, relative to its own largest entry.

    Some gradients are zero but for rounding, such as that of a bias of attention's keys, which softmax takes out again.
    They count as at least ZERO times the largest gradient of the model.
    """
    sizes = {name: tensor.abs().max().item() for name, tensor in expected.items() if tensor is not None}
    floor = ZERO * max(sizes.values())
    return {
        name: _difference(tensor, given[name], max(sizes.get(name, 0.0), floor)) for name, tensor in expected.items()
    }


def _difference(expected: Tensor | None, given: Tensor | None, size: float) -> float:
    if expected is None or given is None:
        return 0.0 if expected is None and given is None else float("inf")
    return (expected - given).abs().max().item() / size


def _quiet(_: str) -> None:
    """Tests need no header."""
