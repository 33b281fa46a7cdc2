"""Checks of how a run is used: each stands for a mistake that would train something else.

Every function here raises. None of them changes anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh
from shoal.errors import ShoalError, StrategyRefused, UsageError
from shoal.strategies.base import LocalBatch, LocalModel, Strategy
from shoal.weights.deferred_init import EmptyTensor, seeds_of

MOST_ROWS = 1 << 53
_CURE = (
    "forward_backward(compute_loss, *batch) calls compute_loss(*batch), which returns the loss: "
    "def compute_loss(x, y): return loss_fn(model(x), y)."
)


def check_on_device(model: nn.Module, device: torch.device) -> None:
    """Raise UsageError for a parameter with memory that is not on `device`."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and device.type != "meta":
            raise UsageError(
                f"{name} is on the meta device, which keeps no values and no initialization. Build "
                "the model in `with shoal.empty_weights():` instead."
            )
        if parameter.device != device and not isinstance(parameter, EmptyTensor):
            raise UsageError(
                f"{name} is on {parameter.device}; this rank's device is {device}. Call "
                "model.to(run.device) before the optimizer is built."
            )


def check_context_has_ended() -> None:
    """Raise UsageError inside of `shoal.empty_weights()`."""
    if isinstance(torch.empty(0), EmptyTensor):
        raise UsageError(
            "prepare was called inside of `with shoal.empty_weights():`, where no tensor gets "
            "memory. Build the models there, and end the context before."
        )


def check_same_seeds(model: nn.Module, mesh: Mesh) -> None:
    """Raise UsageError on all ranks if weights without memory follow from other seeds. Collective.

    Each rank may fill its own share of them, so together they would be no model.
    """
    if not mesh.is_same(seeds_of(model)):
        raise UsageError(
            "prepare: the ranks have drawn other random numbers before shoal.empty_weights(), so "
            "they would start from other weights. Call shoal.init first, which seeds all ranks "
            "alike, and draw the same on all of them up to there."
        )


def check_no_renormalising(model: nn.Module, data_ranks: int) -> None:
    """Raise StrategyRefused if a layer writes its weight in the forward pass, by a rank's rows."""
    if data_ranks == 1:
        return
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.max_norm is not None and module.weight.requires_grad:
            raise StrategyRefused(
                f"{name or type(module).__name__}: max_norm writes into its weight in each forward "
                "pass, in those rows that this rank's samples use, so the weights of the "
                f"{data_ranks} data ranks would come apart. Leave max_norm out, and divide what "
                "the layer returns: "
                "rows / (rows.norm(dim=-1, keepdim=True) / max_norm).clamp(min=1)."
            )


def check_takes_scaled(local_model: LocalModel) -> None:
    """Raise StrategyRefused for gradients that carry the loss scale of fp16, which changes.

    Error feedback, for example, is in the unit of gradients, and the scale changes that unit.
    """
    if local_model.remote_optimizer is not None:
        raise StrategyRefused(
            "fp16 skips a step if any gradient overflows; servers cannot skip one. Use bf16."
        )
    if local_model.strategy_state.in_gradient_units:
        raise StrategyRefused(
            "fp16 multiplies gradients by a scale that changes, and skips steps: what this "
            "strategy keeps of gradients and steps from one to the next does not go with that. Use "
            "bf16."
        )


def check_frozen_unchanged(
    frozen: Mapping[str, nn.Parameter], strategies: Iterable[Strategy]
) -> None:
    """Raise UsageError if a parameter that was frozen in `prepare` is trainable now."""
    if not frozen:
        return
    unfrozen = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if unfrozen:
        again = "Call run.prepare(optimizer) again with an optimizer that has it, unfreeze it"
        if not all(strategy.can_apply_again for strategy in strategies):
            # There the second prepare would be refused.
            again = "Unfreeze it, with a learning rate of 0 as long as it is to rest,"
        raise UsageError(
            f"{', '.join(unfrozen)}: unfrozen after prepare, so no optimizer steps it. {again} "
            "before run.prepare(...), or freeze it again."
        )


def check_compute_loss(compute_loss: Any, args: tuple[Any, ...]) -> None:
    """Raise UsageError if the first argument of `forward_backward` is no function of the batch."""
    if not callable(compute_loss):
        kind = "loss" if isinstance(compute_loss, Tensor) else type(compute_loss).__name__
        raise UsageError(f"forward_backward was given a {kind}, and takes a function. {_CURE}")
    if any(isinstance(argument, nn.Module | Optimizer) for argument in args):
        raise UsageError(
            f"forward_backward was given a model or an optimizer in the place of a batch. {_CURE}"
        )


def check_step_options(rows: Any, reduction: Any) -> None:
    """Raise UsageError for options of `forward_backward` of a wrong kind."""
    is_count = isinstance(rows, int) and not isinstance(rows, bool) and 0 <= rows < MOST_ROWS
    if rows is not None and not is_count:
        raise UsageError(
            "rows: the number of samples on this rank, an integer. If a batch has a key of that "
            "name, give it in one piece: run.forward_backward(compute_loss, batch)."
        )
    if not isinstance(reduction, str) or reduction not in ("rows", "ranks"):
        raise UsageError(
            f'reduction: {reduction!r} is neither "rows", the mean over all samples, nor "ranks", '
            "the mean of the ranks' means. If a batch has a key of that name, give it in one "
            "piece: run.forward_backward(compute_loss, batch)."
        )


def check_norm(max_norm: Any, norm_type: Any) -> None:
    """Raise UsageError for a bound of `clip_gradients` that is not above 0, or another norm."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1 and not max_norm.is_complex():
        max_norm = max_norm.item()
    is_number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not is_number or not max_norm > 0:
        raise UsageError(
            f"clip_gradients: the largest norm {_shown(max_norm)} is no number above 0, such as 1.0"
        )
    if not isinstance(norm_type, int | float) or norm_type not in (2, math.inf):
        raise UsageError(
            f'clip_gradients: norm_type={_shown(norm_type)} is neither 2 nor float("inf"). Use one.'
        )


def check_tensor(call: str, value: Any) -> None:
    """Raise UsageError if `call`, which takes rows, was given something else."""
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{call} takes a tensor whose dimension 0 are rows, and was given a "
            f"{type(value).__name__}. Call it for each tensor."
        )
    if value.dim() == 0:
        raise UsageError(f"{call} takes a tensor whose dimension 0 are rows; this one is a number.")


def check_views(views: Any, rows: int) -> None:
    """Raise UsageError if so many rows are not so many views of as many samples each."""
    if not isinstance(views, int) or isinstance(views, bool) or views < 1 or rows % views:
        raise UsageError(
            f"run.gather: {rows} rows are not views={_shown(views)} views of the same samples. "
            "Leave views out for a row of each sample."
        )


def check_path(call: str, path: Any) -> None:
    """Raise UsageError if a path is no text, or empty."""
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise UsageError(f'{call}: {_shown(path)} is no path of a file, such as "model.pt"')


def check_state(*parts: Any) -> None:
    """Raise UsageError if the arguments of `load_state` are not the three that `state` returns."""
    for name, part in zip(("tensors", "info", "private"), parts, strict=True):
        if not isinstance(part, Mapping):
            raise UsageError(
                f"load_state: {name} is a {type(part).__name__}. It takes what run.state() "
                "returned: tensors, info, private = run.state()."
            )


def check_decay(decay: Any, has_average: bool) -> None:
    """Raise UsageError for a moving average that cannot be made."""
    if has_average:
        raise UsageError("run.ema: this run has a moving average already, of all its models.")
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1:
        raise UsageError(f"run.ema({decay!r}): the decay is a number between 0 and 1, as in 0.999.")


RETURNED = {
    "evaluate": 'sums over it, such as {"correct": (scores.argmax(1) == y).sum()}',
    "predict": 'a row for each sample, such as {"scores": scores, "target": y}',
}


def check_evaluation(call: str, function: Any, loader: Any, models: Sequence[Any]) -> None:
    """Raise UsageError for arguments of `evaluate` and `predict` of a wrong kind."""
    if not callable(function):
        raise UsageError(
            f"{call} was given a {type(function).__name__}, and takes a function of a batch that "
            f"returns {RETURNED[call]}."
        )
    if isinstance(loader, Tensor | str | bytes):
        raise UsageError(
            f"{call} was given a {type(loader).__name__} to take batches from; it takes a "
            "DataLoader or a list of batches."
        )
    for model in models:
        if not isinstance(model, nn.Module):
            raise UsageError(f"{call}: a {type(model).__name__} is no model.")


def check_metrics(metrics: Any) -> None:
    """Raise UsageError if `metrics` of `evaluate` is no dict of metrics."""
    calls = ("reset", "update", "compute")
    is_dict = isinstance(metrics, Mapping) and all(
        callable(getattr(metric, call, None)) and not isinstance(metric, type)
        for metric in metrics.values()
        for call in calls
    )
    if metrics is not None and not (is_dict and metrics):
        raise UsageError(
            f"evaluate: metrics={metrics!r} is no dict of metrics with reset, update and compute, "
            'such as {"auc": torchmetrics.AUROC(task="multiclass", num_classes=10)}.'
        )


def _shown(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def check_some_gradient(local_model: LocalModel) -> None:
    """Raise UsageError if the first backward pass has reached no parameter of this rank.

    The function of the batch has then called other models than the prepared ones.
    """
    elsewhere = local_model.remote_optimizer is not None or local_model.is_partial
    if elsewhere or any(p.grad is not None for p in local_model.trainable_params.values()):
        return
    raise UsageError(
        "forward_backward: no parameter of the prepared models has a gradient. Does compute_loss "
        "call a copy or a wrapper of them, or detach their outputs? It must call the models that "
        "run.prepare returned."
    )


def error_of_step(error: Exception, batch: LocalBatch, in_parts: bool) -> Exception:
    """Return what to raise in place of an error of a step: a better one of a BatchNorm that was
    given one sample of several, or itself with a note of how many samples the user's code was
    given, if not all of them.

    Args: in_parts: the function is called on parts of this rank's samples.
    """
    rows, whole = batch.num_samples, batch.step.global_batch_size
    is_single = batch.step.sizes_known and whole == 1
    if not is_single and (found := single_sample_error(error, rows)):
        return found
    if (in_parts or 0 < rows < whole) and not isinstance(error, ShoalError):
        of_batch = "" if rows == whole else f" (of {whole} in the batch)"
        error.add_note(
            f"shoal: this rank calls compute_loss on {'parts of ' if in_parts else ''}its {rows} "
            f"samples{of_batch}, and only its arguments are divided. A tensor of the whole batch "
            "that it reads from around it must be an argument too. Code that knows the size of a "
            "whole batch (a reshape, a state for each sample) must take it from its arguments: "
            "len(x). A loss that takes several samples together (topk, pairs) computes with those "
            "of all: run.gather(tensor)."
        )
    return error


def single_sample_error(error: BaseException, rows: int) -> UsageError | None:
    """Return the error of a BatchNorm that was given one of several samples; None for others.

    Args: rows: of the batch, this rank's own.
    """
    if "Expected more than 1 value per channel when training" not in str(error):
        return None
    return UsageError(
        f"a BatchNorm was given one sample, of which it can take no variance: {rows} samples "
        "of this batch came to this rank, and micro-batches divide them further. Use "
        "sync_batchnorm=True, with the statistics of the whole batch; larger batches, and "
        "drop_last=True where it is the last one; or fewer micro-batches (accumulate, "
        "pipeline=N,microbatches=M)."
    )
