"""Backward passes outside of `forward_backward`: an error, before any gradient is written.

A hook on each parameter sees them all: of outputs, of submodules and their methods, and
`torch.autograd.grad` with respect to parameters. Gradients with respect to inputs alone pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import unserializable_hook

from shoal.errors import UsageError
from shoal.run.guards.call_site import call_site
from shoal.run.guards.guarded_models import GuardedModels, Removable, StepPhase


def guard_backward(guarded: GuardedModels, phase: StepPhase) -> Iterator[Removable]:
    """Register a hook on each trainable parameter, and yield its handle."""
    for name, parameter in guarded.parameters.items():
        if not parameter.requires_grad:
            continue
        hook = _hook(name, phase)
        if isinstance(parameter, DTensor):
            # Hooks on the tensor do not run where fully_shard computes with another one.
            yield parameter.register_post_accumulate_grad_hook(hook)
        else:
            yield parameter.register_hook(hook)


def _hook(name: str, phase: StepPhase) -> Any:
    def check(_: Tensor) -> None:
        if not phase.in_passes:
            raise UsageError(
                f"a bare .backward() or autograd.grad() reached {name} outside of "
                f"run.forward_backward{call_site()}: its gradient would be this rank's alone. Use "
                "loss = run.forward_backward(compute_loss, x, y), with a function that computes "
                "the loss, instead of loss.backward(). Gradients of inputs alone are free: "
                "torch.autograd.grad(loss, x)."
            )

    # Saving a model with its parameters leaves the hook out, without a warning.
    return unserializable_hook(check)
