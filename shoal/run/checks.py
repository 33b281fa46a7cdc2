"""What a run refuses, because it would train something else than what was meant."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.errors import StrategyRefused, UsageError
from shoal.strategies.base import LocalModel


def refuse_misplaced(model: nn.Module, device: torch.device) -> None:
    """Raise UsageError for a parameter on another device."""
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise UsageError(
                f"{name} is on {parameter.device}; this rank's device is {device}. Call "
                "model.to(run.device) "
                "before the optimizer is built."
            )


def refuse_without_loader(accumulate: int, step_in_backward: bool) -> None:
    """Raise UsageError for settings that need to know the global batch."""
    if accumulate > 1:
        raise UsageError(
            "accumulate splits what the loader shares out; prepare a loader, or use accumulate=1."
        )
    if step_in_backward:
        raise UsageError(
            "step_in_backward needs the size of the global batch before the backward pass. Prepare "
            "a loader, or "
            "use step_in_backward=False."
        )


def refuse_with_servers(scaled: bool, step_in_backward: bool) -> None:
    """Raise StrategyRefused for settings of a run whose parameters are stepped elsewhere."""
    if scaled:
        raise StrategyRefused(
            "fp16 skips a step if any gradient overflows; servers cannot skip one. Use bf16."
        )
    if step_in_backward:
        raise StrategyRefused(
            "step_in_backward: servers step the parameters. Use step_in_backward=False."
        )


def refuse_scaled(scaled: bool) -> None:
    """Raise StrategyRefused where what a strategy keeps from step to step would change its unit
    with the loss scale.
    """
    if scaled:
        raise StrategyRefused(
            "fp16 multiplies gradients by a scale that changes, and skips steps: what this "
            "strategy keeps of gradients "
            "and steps from one to the next does not go with that. Use bf16."
        )


def refuse_unprepared(part: LocalModel | None) -> LocalModel:
    """The part, or UsageError where there is none yet."""
    if part is None:
        raise UsageError(
            "no model was prepared. Before the loop: model, optimizer, loader = run.prepare(model, "
            "optimizer, loader)."
        )
    return part


def check_frozen_unchanged(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError where a parameter that was frozen in `prepare` no longer is."""
    thawed = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if thawed:
        raise UsageError(
            f"{', '.join(thawed)}: unfrozen after prepare, so no optimizer steps it. Unfreeze it "
            "before "
            "run.prepare(...), or freeze it again."
        )


def check_same_optimizer(model: nn.Module, prepared: nn.Module) -> None:
    """Raise UsageError for a model that is not the prepared one."""
    if model is not prepared:
        raise UsageError(
            f"forward_backward was given a {type(model).__name__} that is not the prepared model. "
            "Use the one that "
            "run.prepare returned."
        )
