"""Functions of a step on any local model: loss and totals, passes, scaling and norm of gradients.

compute_weighted_loss   the user's function on a micro-batch, and its loss with the weight by which
                        all losses sum to the global mean
run_microbatch      its forward and backward passes on one rank
forward_backward    `run` and `reduce_gradients` of a local model
mean_loss           the loss sum of a step, divided by the samples or by the count
rescale_by_count    the division by a count that no rank knew before
split_microbatches  consecutive samples of a batch, split along dimension 0

      samples   │ 0 1 2 │ 3 4 5 │ 6 7 │       8 samples in 3 micro-batches
      stop                          ▲         a stop request travels with the last one

scaled_for_mean, mean_result   factors that turn a mean over n ranks into a sum:

      loss of a rank     weighted by its share of the global batch; all losses sum to the mean
      scaled_for_mean    each rank multiplies its loss and its totals by n
      mean over ranks    (n a + n b + ...) / n  =  a + b + ...

PyTorch's engines, and rank-order means, divide by the number of ranks. Every strategy undoes that
division with these two functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal.comm.norm import global_norm, max_with_nan, to_local
from shoal.data.tree_map import take_rows
from shoal.errors import UsageError
from shoal.platform.tensors import tensor_on
from shoal.platform.torch_private.kernels import foreach_mul_
from shoal.strategies.base import (
    COUNT,
    LOSS_SUM,
    SUMMED,
    TOTALS_LENGTH,
    ComputedLoss,
    Extra,
    Forward,
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
)
from shoal.strategies.loss_terms import add_summed, combine_terms, detach, split_result
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


def run_microbatch(forward: Forward, batch: LocalBatch) -> StepResult:
    """Compute the forward and backward passes of one micro-batch on one rank."""
    progress = own_progress()
    progress.enter(Phase.FORWARD)
    output = forward(batch)
    if not output.loss.requires_grad:
        raise UsageError(
            "compute_loss returned a loss that depends on no trainable parameter, so there is no "
            "gradient: is it detached, made of numbers, or computed under no_grad?"
        )
    progress.enter(Phase.BACKWARD)
    try:
        if output.totals_param is None:
            output.loss.backward()
        else:
            torch.autograd.backward((output.loss, output.totals_param), (None, output.step_totals))
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        if isinstance(batch.step.compute_loss, ComputedLoss):
            raise UsageError(
                "run.backward: a part of this loss was computed before the last run.backward, and "
                "its graph is used up. Detach what a step hands to the next: hidden = "
                "hidden.detach(). Add up the losses of one step: run.backward(loss_1 + loss_2)."
            ) from error
        raise UsageError(
            "a part of the loss was computed before compute_loss was called, and its graph is used "
            "up: compute_loss is called several times in some steps. Keep inputs, choices and "
            "rewards instead, and call the model inside of compute_loss."
        ) from error
    extras = () if output.extra is None else (output.extra,)
    return StepResult(output.step_totals, output.is_sum_and_count, extras)


def compute_weighted_loss(batch: LocalBatch) -> ForwardOutput:
    """Call the user's function on a micro-batch, and weight what it returns."""
    return weighted_loss(batch.function(*batch.args, **batch.kwargs), batch)


def weighted_loss(result: Any, batch: LocalBatch) -> ForwardOutput:
    """Return the loss of a micro-batch, weighted so that all micro-batches sum to the global mean.

    A mean over samples gets the weight num_samples / global_batch_size. A sum with a count is
    divided by `global_batch_size` for now, which every rank knows, and by the true count later
    (`rescale_by_count`). So no rank waits for a count before its backward pass. Losses of several
    terms need their counts before it.

    Args: result: the value that `compute_loss` has returned.

    Raises: UsageError: it is no loss, or has too many summed values.
    """
    terms, extra = split_result(result)
    value, is_sum, count, weight = combine_terms(terms, batch)
    # A sum is taken once, a mean once for each sample, and the loss of a stand-in not at all.
    multiplier = min(batch.num_samples, 1) if is_sum else batch.num_samples * weight
    # Few operations: each takes as long as a small layer.
    detached = value.detach()
    if batch.step.note_loss is not None:
        batch.step.note_loss(detached)
    if value.dtype.itemsize < 4:
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
    if count is not None and multiplier:
        totals[COUNT] = count * batch.grad_weight
    if extra is not None and multiplier:
        add_summed(totals, extra, batch.grad_weight)
    if batch.previous_totals is not None:
        totals += batch.previous_totals
    factor_of_loss = multiplier / batch.step.global_batch_size * batch.grad_weight
    weighted = value if factor_of_loss == 1.0 else value * factor_of_loss
    returned = None if extra is None else Extra(batch.num_samples, detach(extra))
    return ForwardOutput(weighted, totals, is_sum, returned)


@lru_cache(maxsize=64)
def _cached_factor_and_counts(
    multiplier: float,
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
    zeros = [0.0] * (TOTALS_LENGTH - SUMMED)
    tensor = tensor_on([loss_factor, *counts, *zeros], dtype, device)
    return tensor[:COUNT], tensor[COUNT:]


def forward_backward(model: LocalModel, batch: LocalBatch) -> StepResult:
    """Compute a batch and reduce: owned gradients are global means afterwards. Collective."""
    result = model.run(model.forward, batch)
    own_progress().enter(Phase.REDUCE)
    model.reduce_gradients()
    return result


def mean_loss(
    result: StepResult, global_batch_size: int, numbers: Sequence[float] | None = None
) -> Tensor:
    """Return the global mean loss of a step, a scalar.

    Args: numbers: the totals as Python's numbers, where they are at hand.
    """
    totals = result.step_totals
    if numbers is not None and not result.is_sum_and_count:
        return totals.new_full((), numbers[LOSS_SUM] / global_batch_size)  # the same bits, sooner
    count = count_or_one(totals) if result.is_sum_and_count else global_batch_size
    return totals[LOSS_SUM] / count


def rescale_by_count(model: LocalModel, result: StepResult, global_batch_size: int) -> None:
    """Divide owned gradients by the global count, if the loss is one sum with a count.

    `weighted_loss` has divided by `global_batch_size`, because no rank knew the global count then.
    """
    if result.is_sum_and_count:
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
    # Offloaded shards lie on the CPU, and scalars beside them on the device.
    for device in {gradient.device for gradient in gradients}:
        foreach_mul_([g for g in gradients if g.device == device], factor.to(device))


def gradient_norm(
    model: LocalModel, gradients: Mapping[str, Tensor], norm_type: float = 2.0
) -> Tensor:
    """Return the norm of gradients over all ranks that hold other layers. Collective.

    Args:
        gradients: by the names of `model.trainable_params`.
        norm_type: 2 or infinity, as in `global_norm`.

    Returns: scalar tensor; float64 in a pipeline.
    """
    if model.pipeline.axis is None:
        return global_norm(gradients.values(), norm_type)
    duplicated = model.pipeline.duplicated_params
    own = [gradient for name, gradient in gradients.items() if name not in duplicated]
    # One dtype on all ranks, for a stage without parameters has none of its own. All ranks must
    # clip by the same factor.
    local_norm = global_norm(own, norm_type).to(model.pipeline.axis.device, torch.float64)
    if norm_type == torch.inf:
        return max_with_nan(local_norm, model.pipeline.axis.all_reduce_max)
    return model.pipeline.axis.all_reduce(local_norm.square()).sqrt()


def count_or_one(totals: Tensor) -> Tensor:
    """Return the global count, or 1 if it is 0: a batch of ignored tokens gives zeros, no NaN."""
    count = totals[COUNT]
    return torch.where(count == 0, torch.ones_like(count), count)


def scaled_for_mean(batch: LocalBatch, num_ranks: int) -> LocalBatch:
    """Return `batch` with `num_ranks` times its weight, so that means over ranks become sums."""
    return batch._replace(grad_weight=batch.grad_weight * num_ranks)


def mean_result(local: StepResult, summed_totals: Tensor, num_ranks: int) -> StepResult:
    """Return the result of a step whose batches went through `scaled_for_mean`.

    Args:
        local: the result of this rank.
        summed_totals: (TOTALS_LENGTH,), the sum of the totals over `num_ranks` ranks.
    """
    return local._replace(step_totals=summed_totals / num_ranks)


def split_microbatches(batch: LocalBatch, count: int, min_count: int = 1) -> Iterator[LocalBatch]:
    """Split a batch along dimension 0 of every tensor, into micro-batches of nearly equal size.

    Args:
        count: micro-batches. A batch of fewer samples gives one for each sample.
        min_count: micro-batches that there must be all the same. Stand-ins of weight 0 fill up.
    """
    count = min(count, max(batch.num_samples, min_count))
    base, extra = divmod(batch.num_samples, count)
    start = 0
    for index in range(count):
        num_samples = base + (index < extra)
        # A stand-in computes the first sample: a forward pass needs one.
        window = slice(start, start + num_samples) if num_samples else slice(0, 1)
        is_last = index == count - 1
        args, kwargs = samples_of(batch, window)
        yield batch._replace(
            args=args,
            kwargs=kwargs,
            num_samples=num_samples,
            first_row=batch.first_row + start,
            microbatch=batch.microbatch * count + index,
            is_last_microbatch=is_last,
            stop_requested=batch.stop_requested and is_last,
        )
        start += num_samples


def samples_of(batch: LocalBatch, window: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments with the samples `window` alone.

    Raises: UsageError: dimension 0 of a tensor is not the number of samples.
    """

    def mismatch(tensor: Tensor) -> UsageError:
        return UsageError(
            "accumulate and pipeline split batches along dimension 0; this rank has "
            f"{batch.num_samples} samples and a tensor of shape {tuple(tensor.shape)}. Put the "
            "batch dimension first, or use accumulate=1 and microbatches=1."
        )

    def taken(value: Any) -> Any:
        return take_rows(value, window, batch.num_samples, mismatch)

    if 0 < batch.num_samples <= window.stop - window.start:
        return batch.args, dict(batch.kwargs)  # all, whatever their shapes
    # `args` itself is no list of samples, though it may be as long as one.
    return tuple(map(taken, batch.args)), taken(dict(batch.kwargs))
