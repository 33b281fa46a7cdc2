"""Functions of a step on any local model: loss and totals, passes, scaling and norm of gradients.

weighted_loss       loss of a micro-batch, weighted so that all of them sum to the global mean
run_microbatch      its forward and backward passes on one rank
forward_backward    `run` and `reduce_gradients` of a local model
rescale_by_count    the division by a count that no rank knew before
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal.comm.norm import global_norm, to_local
from shoal.errors import UsageError
from shoal.platform.torch_private.kernels import foreach_mul_
from shoal.strategies.base import (
    COUNT,
    MEASURED,
    TOTALS_LENGTH,
    Forward,
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
)


def run_microbatch(forward: Forward, batch: LocalBatch) -> StepResult:
    """Compute the forward and backward passes of one micro-batch on one rank."""
    output = forward(batch)
    if output.totals_param is None:
        output.loss.backward()
    else:
        torch.autograd.backward((output.loss, output.totals_param), (None, output.step_totals))
    return StepResult(output.step_totals, output.is_sum_and_count)


def check_scalar_loss(loss: Tensor) -> None:
    """Raise UsageError if a loss function returned one value for each sample, or the like."""
    if loss.dim() != 0:
        raise UsageError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; it must return the mean over "
            "its batch (a scalar), or a (sum, count) pair of scalars."
        )


def weighted_loss(output: Any, batch: LocalBatch) -> ForwardOutput:
    """Compute the loss of a micro-batch, weighted so that all micro-batches sum to the global mean.

    A mean over samples gets the weight num_samples / global_batch_size. A (sum, count) is divided
    by `global_batch_size` for now, which every rank knows, and by the true count later
    (`rescale_by_count`). So no rank waits for a count before its backward pass.

    Raises: UsageError: the loss is no scalar, or the measure has too many values.
    """
    value = batch.loss_fn(output, batch.target)
    is_sum_and_count = isinstance(value, tuple)
    loss, count = value if isinstance(value, tuple) else (value, batch.num_samples)
    check_scalar_loss(loss)
    # A sum is taken once, a mean once for each sample, and the loss of a stand-in not at all.
    multiplier = min(batch.num_samples, 1) if is_sum_and_count else batch.num_samples
    weight = multiplier / batch.global_batch_size * batch.grad_weight
    # Few operations: each takes as long as a small layer.
    detached = loss.detach()
    if loss.dtype.itemsize < 4:
        detached = detached.float()
    factor, counts = _cached_factor_and_counts(
        multiplier,
        batch.num_samples,
        batch.stop_requested,
        batch.grad_weight,
        detached.dtype,
        detached.device,
    )
    totals = torch.cat((detached * factor, counts))
    if is_sum_and_count and multiplier:
        totals[COUNT] = count * batch.grad_weight
    if batch.measure is not None and multiplier:
        measured = batch.measure(output, batch.target).detach()
        if len(measured) > TOTALS_LENGTH - MEASURED:
            raise UsageError(
                f"measure returned {len(measured)} numbers; a step carries "
                f"{TOTALS_LENGTH - MEASURED}."
            )
        totals[MEASURED : MEASURED + len(measured)] = measured * batch.grad_weight
    if batch.previous_totals is not None:
        totals += batch.previous_totals
    weighted = loss if weight == 1.0 else loss * weight
    return ForwardOutput(weighted, totals, is_sum_and_count)


@lru_cache(maxsize=64)
def _cached_factor_and_counts(
    multiplier: int,
    num_samples: int,
    stop_requested: bool,
    grad_weight: float,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the factor of the loss, (1,), and the totals from COUNT on as known so far.

    Both are equal in nearly every step. Without the cache, torch would make a tensor of each Python
    number in every step.
    """
    loss_factor = multiplier * grad_weight
    counts = [num_samples * grad_weight, stop_requested * grad_weight]
    zeros = [0.0] * (TOTALS_LENGTH - MEASURED)
    tensor = torch.tensor([loss_factor, *counts, *zeros], dtype=dtype, device=device)
    return tensor[:COUNT], tensor[COUNT:]


@lru_cache(maxsize=64)
def cached_scalar_tensor(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scalar tensor, which nobody may write to.

    Without the cache, torch makes a new tensor for each operation with a Python number.
    """
    return torch.tensor(value, dtype=dtype, device=device)


def forward_backward(model: LocalModel, batch: LocalBatch) -> StepResult:
    """Compute a batch and reduce: owned gradients are global means afterwards. Collective."""
    result = model.run(model.forward, batch)
    model.reduce_gradients()
    return result


def rescale_by_count(model: LocalModel, result: StepResult, global_batch_size: int) -> None:
    """Divide owned gradients by the global count, if the loss function returned (sum, count).

    `weighted_loss` has divided by `global_batch_size`, because no rank knew the global count then.
    """
    if not result.is_sum_and_count:
        return
    scale_gradients(model, global_batch_size / count_or_one(result.step_totals))


def scale_gradients(model: LocalModel, factor: Tensor) -> None:
    """Multiply the global gradients by a scalar tensor, on this rank or in a remote optimizer."""
    if model.remote_optimizer is not None:
        model.remote_optimizer.scale(factor)
        return
    gradients = [
        to_local(parameter.grad)
        for parameter in model.trainable_params.values()
        if parameter.grad is not None
    ]
    if gradients:
        foreach_mul_(gradients, factor)


def gradient_norm(model: LocalModel, gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the 2-norm of gradients over all ranks that hold other layers. Collective.

    Args: gradients: by the names of `model.trainable_params`.

    Returns: scalar tensor; float64 in a pipeline.
    """
    if model.pipeline_axis is None:
        return global_norm(gradients.values())
    local_norm = global_norm(
        gradient for name, gradient in gradients.items() if name not in model.duplicated_params
    )
    # One dtype on all ranks, for a stage without parameters has none of its own. All ranks must
    # clip by the same factor.
    square = local_norm.to(model.pipeline_axis.device, torch.float64).square()
    return model.pipeline_axis.all_reduce(square).sqrt()


def count_or_one(totals: Tensor) -> Tensor:
    """Return the global count, or 1 if it is 0: a batch of ignored tokens gives zeros, no NaN."""
    count = totals[COUNT]
    return torch.where(count == 0, torch.ones_like(count), count)
