"""Checks of how a run is used: each stands for a mistake that would train something else.

Every function here raises. None of them changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.errors import StrategyRefused, UsageError
from shoal.strategies.base import LocalModel


def check_on_device(model: nn.Module, device: torch.device) -> None:
    """Raise UsageError for a parameter that is not on `device`."""
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise UsageError(
                f"{name} is on {parameter.device}; this rank's device is {device}. Call "
                "model.to(run.device) before the optimizer is built."
            )


def check_loader_not_needed(accumulate: int, step_in_backward: bool) -> None:
    """Raise UsageError for settings that need to know the global batch size beforehand."""
    if accumulate > 1:
        raise UsageError(
            "accumulate splits what the loader shares out; prepare a loader, or use accumulate=1."
        )
    if step_in_backward:
        raise UsageError(
            "step_in_backward needs the size of the global batch before the backward pass. Prepare "
            "a loader, or use step_in_backward=False."
        )


def check_settings_for_servers(scaled: bool, step_in_backward: bool) -> None:
    """Raise StrategyRefused for settings that need an optimizer step in this process.

    Args:
        scaled: gradients carry the loss scale of fp16.
    """
    if scaled:
        raise StrategyRefused(
            "fp16 skips a step if any gradient overflows; servers cannot skip one. Use bf16."
        )
    if step_in_backward:
        raise StrategyRefused(
            "step_in_backward: servers step the parameters. Use step_in_backward=False."
        )


def check_not_scaled(scaled: bool) -> None:
    """Raise StrategyRefused where the loss scale of fp16 would change the strategy's state.

    Error feedback, for example, is in the unit of gradients, and the scale changes that unit.
    """
    if scaled:
        raise StrategyRefused(
            "fp16 multiplies gradients by a scale that changes, and skips steps: what this "
            "strategy keeps of gradients and steps from one to the next does not go with that. Use "
            "bf16."
        )


def check_prepared(local_model: LocalModel | None) -> LocalModel:
    """Return the local model. Raise UsageError if there is none yet."""
    if local_model is None:
        raise UsageError(
            "no model was prepared. Before the loop: model, optimizer, loader = run.prepare(model, "
            "optimizer, loader)."
        )
    return local_model


def check_frozen_unchanged(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError if a parameter that was frozen in `prepare` is trainable now."""
    unfrozen = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if unfrozen:
        raise UsageError(
            f"{', '.join(unfrozen)}: unfrozen after prepare, so no optimizer steps it. Unfreeze it "
            "before run.prepare(...), or freeze it again."
        )


def check_same_model(model: nn.Module, prepared: nn.Module) -> None:
    """Raise UsageError for a model that is not the prepared one.

    A wrapper or a copy would compute with other parameters than the optimizer steps.
    """
    if model is not prepared:
        raise UsageError(
            f"forward_backward was given a {type(model).__name__} that is not the prepared model. "
            "Use the one that run.prepare returned."
        )
