"""The same few training steps twice: by hand in one process, and through Shoal on many ranks.

A forward pass that updates a buffer, such as a moving average, sees only the samples of its own
rank. So the ranks have different values, and those of rank 0 are evaluated and saved. This is a
difference by design of that buffer. Gradients and weights may differ for this reason only if
training also reads the buffer, and `training_reads` finds that out with the reference model.
BatchNorm has a note of its own, which the run prints before the first step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
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
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.run import Run, init_with_place
from shoal.run.first_step_notes import WRITES
from shoal.run.init import seed_generators
from shoal.run.preparation import Draws
from shoal.run.supervised import LossFunction, supervised
from shoal.strategies.loss_terms import split_result
from shoal.verification.differences import differences


@dataclass(frozen=True)
class Experiment:
    """The model, the data and the loss of a proof.

    The functions stand at the top of a module, because every rank imports them.
    """

    model_fn: Callable[[], nn.Module]
    loader_fn: Callable[[], DataLoader]
    """Returns a loader whose batches are the global ones."""
    loss_fn: LossFunction
    steps: int = 5
    sync_batchnorm: bool = False
    """The ranks take BatchNorm's statistics together."""


@dataclass(frozen=True)
class RankReport:
    """The result of one rank.

    Attributes:
        errors: relative errors of losses, gradients, weights and buffers, by a description of the
            tensor.
        notes: the notes that the run printed before the first step, such as that of BatchNorm.
        by_rank: the descriptions in `errors` of buffers that depend on a rank's samples.
        buffers_read: training reads the values that it writes to these buffers.
        refusal: the message, where the strategy did not accept the model.
    """

    errors: dict[str, float]
    notes: list[str]
    by_rank: frozenset[str] = frozenset()
    buffers_read: bool = False
    refusal: str | None = None


def run_reference(experiment: Experiment, file: Path) -> None:
    """Train by a plain loop over global batches in one process, and write the results to `file`."""
    hide_gpu()
    torch.manual_seed(0)
    model = experiment.model_fn().double()
    optimizer = _sgd(model)
    buffers_before = copy_buffers(model)
    seed_generators(0)  # of Python and NumPy, as shoal.init does
    torch.manual_seed(derive_seed(0, 0))  # so that dropout draws the same numbers as on rank 0
    losses: list[Tensor] = []
    gradients: list[dict[str, Tensor | None]] = []
    norms: list[Tensor] = []
    loader = DistributedBatchLoader(experiment.loader_fn(), rank=0, ranks=1, seed=0)
    for *inputs, target in _steps(experiment, loader):
        optimizer.zero_grad()
        loss = _loss(experiment, model, inputs, target)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
        flat = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        norms.append(torch.cat(flat).norm())
        optimizer.step()
    expected = {
        "losses": losses,
        "gradients": gradients,
        "norms": norms,
        "weights": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "buffers": copy_buffers(model),
        "changed": changed_buffers(model, buffers_before),
    }
    # Last of all, because it changes the buffers again; the copies above are not affected.
    expected["read"] = bool(expected["changed"]) and training_reads(
        model, buffers_before, lambda: _loss(experiment, model, inputs, target)
    )
    torch.save(expected, file)


def _loss(experiment: Experiment, model: nn.Module, inputs: list[Any], target: Any) -> Tensor:
    """Return the mean loss of a batch, every term divided by its own count.

    Raises: UsageError: loss_fn returned something else.
    """
    result = experiment.loss_fn(model(*inputs), target)
    try:
        terms, _ = split_result(result)
    except UsageError as error:  # it names the function of a step
        raise UsageError(str(error).replace("compute_loss", "loss_fn", 1)) from None
    means = [t.value if t.count is None else t.value / t.count for t in terms]
    return torch.stack(means).sum()


def run_strategy(
    experiment: Experiment, strategy: str, accumulate: int, reference: Path, draws: Draws = "rank"
) -> RankReport:
    """Train by the same loop under a strategy, and compare with the reference. Collective.

    Args:
        experiment: the same as that of the reference.
        strategy: as for `shoal.init`.
        accumulate: micro-batches of each rank's local batch.
        reference: the file of `run_reference`.
        draws: as for `shoal.init`.
    """
    hide_gpu()
    expected: Any = torch.load(reference, weights_only=True, mmap=True)
    summary_lines: list[str] = []
    try:
        run = init_with_place(
            strategy,
            accumulate=accumulate,
            precision="fp64",
            sync_batchnorm=experiment.sync_batchnorm,
            draws=draws,
            announce=summary_lines.append,
        )
        model = experiment.model_fn().double()
        model, optimizer, loader = run.prepare(model, _sgd(model), experiment.loader_fn())
        errors = _train(run, experiment, model, optimizer, loader, expected)
    except (StrategyRefused, UsageError) as refusal:
        return RankReport({}, [], refusal=str(refusal))
    weights = run.weights()
    after = f"after {experiment.steps} steps"
    for name, error in differences(expected["weights"], weights).items():
        errors[f"{name} {after}"] = error
    for name, error in differences(expected["buffers"], weights).items():
        errors[f"buffer {name} {after}"] = error
    is_divided = run.world_size * accumulate > 1
    changed = expected["changed"] if is_divided else []
    by_rank = frozenset(f"buffer {name} {after}" for name in changed)
    # What buffers explain is for `buffer_note` to say: their note would excuse all gradients.
    notes = [
        line.removeprefix("note: ")
        for line in summary_lines
        if line.startswith("note: ") and WRITES not in line
    ]
    return RankReport(errors, notes, by_rank, expected["read"])


def _train(
    run: Run,
    experiment: Experiment,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DistributedBatchLoader,
    expected: Any,
) -> dict[str, float]:
    """Take all steps; return the errors of losses and gradients, by a description. Collective."""
    errors: dict[str, float] = {}
    for step, (*inputs, target) in enumerate(_steps(experiment, loader)):
        optimizer.zero_grad()
        loss = run.forward_backward(supervised(experiment.loss_fn, model), *inputs, target)
        errors[f"loss of step {step}"] = _relative(loss, expected["losses"][step])
        if run.is_synchronous:  # otherwise this step's gradients are not averaged yet
            for name, error in differences(expected["gradients"][step], run.gradients()).items():
                errors[f"gradient of {name} in step {step}"] = error
            norm = run.clip_gradients(math.inf)
            errors[f"norm of all gradients in step {step}"] = _relative(
                norm, expected["norms"][step]
            )
        optimizer.step()
    return errors


def _relative(value: Tensor, expected: Tensor) -> float:
    """Return the relative error of a scalar."""
    return ((value - expected).abs() / expected.abs().clamp(min=1e-30)).item()


def hide_gpu() -> None:
    """Train on the CPU. Most GPUs are slow in float64, and their sums differ from run to run."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _steps(experiment: Experiment, loader: DistributedBatchLoader) -> Iterator[Any]:
    """Yield one batch for each step, in float64, over several epochs where that is needed."""
    remaining = experiment.steps
    while remaining > 0:
        remaining_before = remaining
        for batch in loader:
            yield _double(batch)
            remaining -= 1
            if remaining == 0:
                return
        if remaining == remaining_before:
            raise UsageError("the loader gives no batch.")


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tree_map(value, _double)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer with two groups of different settings.

    A parameter that a strategy binds to the wrong group then gets another weight.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": trainable[::2]},
        {"params": trainable[1::2], "lr": 0.05, "weight_decay": 0},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]], lr=0.1, momentum=0.9, weight_decay=0.01
    )


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are in the model's `state_dict`; the tensors themselves."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of `saved_buffers`."""
    return {name: buffer.detach().clone() for name, buffer in saved_buffers(model).items()}


def changed_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the buffers that differ from `before`, except those of BatchNorm."""
    batchnorms = {
        path for path, module in model.named_modules() if isinstance(module, BatchNormBase)
    }
    buffers = saved_buffers(model)
    return [
        name
        for name, value in before.items()
        if name.rpartition(".")[0] not in batchnorms and not torch.equal(value, buffers[name])
    ]


def training_reads(
    model: nn.Module, before: Mapping[str, Tensor], loss_of: Callable[[], Tensor]
) -> bool:
    """Return True if the loss depends on how the buffers have changed since `before`.

    It computes the loss with both sets of buffers and the same random numbers. The buffers of
    `model` change once more by that.
    """
    random_state = torch.get_rng_state()
    losses = []
    for values in (copy_buffers(model), before):
        for name, buffer in saved_buffers(model).items():
            buffer.data.copy_(values[name])
        torch.set_rng_state(random_state)
        with torch.no_grad():
            losses.append(loss_of())
    return not torch.equal(*losses)
