"""Checks of how a run is used: each stands for a mistake that would train something else.

Every function here raises. None of them changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import StrategyRefused, UsageError
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.strategies.base import LocalModel


class BackwardGuard:
    """Turns a bare `.backward()` on a prepared model into an error, never into a wrong gradient.

    A forward hook on the model, and a context manager for the time of a `forward_backward`. Outside
    of that time an output of the model may be read, but not differentiated.

    A copy or a pickle of the model gets a guard that is off: the user may train or average it.
    """

    def __init__(self) -> None:
        self._on = False
        self._in_forward_backward = False

    def watch(self, model: nn.Module) -> None:
        """Guard the outputs of `model` from now on."""
        self._on = True
        model.register_forward_hook(self)

    def __reduce__(self) -> tuple[type[BackwardGuard], tuple[()]]:
        return type(self), ()

    def __enter__(self) -> None:
        self._in_forward_backward = True

    def __exit__(self, *_: object) -> None:
        self._in_forward_backward = False

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._on or self._in_forward_backward or not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(_raise_for_bare_backward)


def _raise_for_bare_backward(_: Tensor) -> None:
    raise UsageError(
        "a bare .backward() reached a prepared model: its gradients would be this rank's alone. "
        "Use loss = run.forward_backward(loss_fn, model, x, y) instead of loss_fn(model(x), y) and "
        "loss.backward()."
    )


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
