"""Calls of torch that no strategy can make right: an error that names the cure.

call                                        where
functional_call(model, weights)             a strategy handles the model's own weights, and would
                                            put them in the place of those that are given
torch.save(model)                           a strategy has parts of its own in the model
GradScaler.unscale_(optimizer), .step(...)  no rank has whole gradients

Elsewhere they are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.platform.torch_private.replaced_functions import FUNCTIONAL_CALL, SAVE, UNSCALING
from shoal.run.guards.full_state import SAVE as SAVE_CURE
from shoal.run.guards.guarded_models import GuardedModels, Places, ProcessWidePatch, replaced
from shoal.run.state_access import is_access_by_shoal


def guard_refused_calls(guarded: GuardedModels, undo: ExitStack) -> None:
    """Refuse what these models do not take, until `undo` is closed."""
    for is_wrong, patch in _CALLS:
        if is_wrong(guarded):
            patch.add(guarded, undo)


def _handles_weights(guarded: GuardedModels) -> bool:
    model = guarded.local_model
    return model.is_divided or model.pass_traits.recomputes


def _changes_model(guarded: GuardedModels) -> bool:
    return _handles_weights(guarded) or guarded.local_model.remote_optimizer is not None


def _gradients_are(guarded: GuardedModels) -> str:
    """Return where the gradients are instead, in words; empty if this rank has them."""
    if guarded.local_model.remote_optimizer is not None:
        return "the servers have the gradients, multiplied by its scale"
    if guarded.local_model.is_divided:
        return "this rank has a part of the gradients, and would skip a step that others take"
    return ""


def _check_own_weights(
    guarded: GuardedModels, module: nn.Module, weights: Any, *_: Any, **__: Any
) -> None:
    """Raise UsageError if a weight is not the one that the module has under that name."""
    inside = {id(inner) for inner in module.modules()}
    own: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    parts = weights if isinstance(weights, (tuple, list)) else [weights]
    other = [name for part in parts for name, value in part.items() if own.get(name) is not value]
    for prefix, model in guarded.models.items():
        if other and any(id(inner) in inside for inner in model.modules()):
            raise UsageError(
                f"functional_call{call_site()}: {prefix}{other[0]} is given as another tensor than "
                f"the model's own;{guarded.under or ' here'} the strategy would put its own in "
                "the place of it. Use ddp."
            )


def _check_saved(guarded: GuardedModels, saved: Any, *_: Any, **__: Any) -> None:
    """Raise UsageError if a prepared model, or a part of one, is in what is saved."""
    if is_access_by_shoal():
        return
    modules = [leaf for leaf in tree_leaves(saved) if isinstance(leaf, nn.Module)]
    inside = {module for each in modules for module in each.modules()}
    if any(inside & {*model.modules()} for model in guarded.models.values()):
        raise UsageError(
            f"torch.save(model){call_site()}{guarded.under}: the model has parts of the strategy "
            f"inside, or lacks parts of its own. {SAVE_CURE}"
        )


def _check_unscaled(guarded: GuardedModels, _: Any, optimizer: Optimizer, *__: Any) -> None:
    """Raise UsageError for a prepared optimizer."""
    if optimizer in guarded.optimizers:
        raise UsageError(
            f"GradScaler{call_site()}{guarded.under}: {_gradients_are(guarded)}. Leave it out, or "
            'give it enabled=False: shoal.init(..., precision="fp16") scales by itself, and '
            'precision="bf16" needs no scale.'
        )


def _checked(places: Places, check: Callable[..., None]) -> ProcessWidePatch:
    """Return a call that `check` looks at first: (models, its arguments) -> None, or it raises."""

    def make(patch: ProcessWidePatch, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            for guarded in patch.active:
                check(guarded, *args, **kwargs)
            return original(*args, **kwargs)

        return call

    return replaced(places, make)


_CALLS: tuple[tuple[Callable[[GuardedModels], Any], ProcessWidePatch], ...] = (
    (_handles_weights, _checked(FUNCTIONAL_CALL, _check_own_weights)),
    (_changes_model, _checked(SAVE, _check_saved)),
    (_gradients_are, _checked(UNSCALING, _check_unscaled)),
)
