"""Backward passes outside of `forward_backward`: an error, before any gradient is written.

A hook on each parameter sees what a pass reaches: from outputs, from submodules and their methods,
and by `torch.autograd.grad` with respect to parameters. Gradients with respect to inputs alone
pass. The hooks are there during passes outside of steps only: in a step they would take some
microseconds for each parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.replaced_functions import BACKWARD
from shoal.run.guards.guarded_models import GuardedModels, ProcessWidePatch, StepPhase, replaced

_FREED = re.compile("setStorage: .* out of bounds for storage of size 0")
CREATE_GRAPH = 3
"""Place of this argument in torch's backward call."""
LENGTH_WITH_INPUTS = 5
"""Arguments of torch's backward call up to its inputs, which are the last of them."""
_NOT_USED = "not have been used in the graph"
_WITHOUT_GRAPH = "does not require grad and does not have a grad_fn"


def guard_backward(guarded: GuardedModels, undo: ExitStack) -> None:
    """Refuse backward passes that reach trainable parameters outside of steps, until `undo` is
    closed.
    """
    _backward_call.add(guarded, undo)


def _make_backward_call(patch: ProcessWidePatch, original: Callable[..., Any]) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        known = patch.active
        outside = [guarded for guarded in known if not guarded.phase.in_passes]
        if not outside:
            return original(*args, **kwargs)
        # A pass by given inputs ends at these. One of another run's step is no end of this one's,
        # which may have failed before, in a notebook say.
        is_step = len(outside) < len(known)
        has_inputs = len(args) >= LENGTH_WITH_INPUTS and args[LENGTH_WITH_INPUTS - 1]
        if not (is_step or has_inputs):
            for guarded in outside:
                if guarded.local_model.outside_step.is_held():  # begun by a call of a model
                    raise UsageError(
                        f"a bare .backward() outside of run.backward{call_site()}{guarded.under}: "
                        "its gradient would be this rank's alone. Use run.backward(loss) instead "
                        "of loss.backward()."
                    )
        handles = [handle for guarded in outside for handle in _hooks(guarded)]
        try:
            gradients = original(*args, **kwargs)
            if has_inputs and args[CREATE_GRAPH]:
                for guarded in outside:
                    guarded.phase.add_gradients(args[0], gradients)
            return gradients
        except RuntimeError as error:
            explained = _explained(error, outside)
            if explained is None:
                raise
            raise explained from error
        finally:
            for handle in handles:
                handle.remove()

    return run_backward


def _explained(error: RuntimeError, outside: list[GuardedModels]) -> UsageError | None:
    """Return what to raise in place of torch's error about a graph that has gone; None if other."""
    for guarded in outside:
        is_sharded = guarded.local_model.has_sharded_params
        if is_sharded and _NOT_USED in str(error):
            return UsageError(
                f"autograd.grad() by parameters{call_site()}{guarded.under}: between its units a "
                "rank holds shards of them. Use zero1 or ddp, and take such gradients inside of "
                "run.forward_backward(compute_loss, x, y). Gradients by inputs are taken."
            )
        freed = is_sharded and _FREED.search(str(error))
        if freed or (guarded.mesh.pipeline.size > 1 and _WITHOUT_GRAPH in str(error)):
            why = "weights that it needs are sharded again" if freed else "other ranks hold layers"
            return UsageError(
                f".backward() or autograd.grad() outside of run.forward_backward{call_site()}"
                f"{guarded.under}: {why}, so what the model returned has no complete graph. To "
                "train, use loss = run.forward_backward(compute_loss, x, y) instead of "
                "loss.backward(). Gradients of inputs are taken anywhere under ddp and tensor"
                f"{', and inside of compute_loss here' if freed else ''}."
            )
    return None


def _hooks(guarded: GuardedModels) -> Iterator[RemovableHandle]:
    """Register a hook on each trainable parameter, and yield its handle."""
    for name, parameter in guarded.parameters.items():
        if not parameter.requires_grad:
            continue
        hook = _refusing(name, guarded.phase)
        if isinstance(parameter, DTensor):
            # Hooks on the tensor do not run where fully_shard computes with another one.
            yield parameter.register_post_accumulate_grad_hook(hook)
        else:
            yield parameter.register_hook(hook)


def _refusing(name: str, phase: StepPhase) -> Any:
    def check(_: Tensor) -> None:
        # A pass outside of steps may have a step within it.
        if not phase.in_passes:
            raise UsageError(
                f"a bare .backward() or autograd.grad() reached {name} outside of "
                f"run.forward_backward{call_site()}: its gradient would be this rank's alone. Use "
                "run.backward(loss) instead of loss.backward(), and inside of a loss that takes "
                "gradients itself run.forward_backward(compute_loss, x, y). Gradients of inputs "
                "alone are free: torch.autograd.grad(loss, x)."
            )

    # Saving a model with its parameters leaves the hook out, without a warning.
    return unserializable_hook(check)


_backward_call = replaced(BACKWARD, _make_backward_call)
