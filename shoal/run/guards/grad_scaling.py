"""`torch.amp.GradScaler` where no rank has whole gradients: an error that names the cure.

Elsewhere it is torch's own, on a loss that `compute_loss` returns as `scaler.scale(loss)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.replaced_functions import replace_unscaling
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch, replaced_by


def guard_grad_scalers(guarded: GuardedModels) -> Iterator[Removable]:
    """Refuse that a GradScaler unscales gradients where it would be wrong; yield a handle."""
    if _where(guarded):
        yield _unscaling.add(guarded)


def _where(guarded: GuardedModels) -> str:
    """Return where the gradients are instead, in words; empty if this rank has them."""
    if guarded.local_model.remote_optimizer is not None:
        return "the servers have the gradients, multiplied by its scale"
    if guarded.steps_in_backward:
        return "with step_in_backward the gradients have been used, multiplied by its scale"
    if guarded.local_model.is_partial or guarded.local_model.has_sharded_params:
        return "this rank has a part of the gradients, and would skip a step that others take"
    return ""


def _make_unscaling(patch: ProcessWidePatch, original: Any) -> Any:
    def unscale_grads(scaler: Any, optimizer: Optimizer, *args: Any) -> Any:
        for guarded in patch.active:
            if optimizer in guarded.optimizers:
                raise UsageError(
                    f"GradScaler{call_site()}{guarded.under}: {_where(guarded)}. Leave it out, or "
                    'give it enabled=False: shoal.init(..., precision="fp16") scales by itself, '
                    'and precision="bf16" needs no scale.'
                )
        return original(scaler, optimizer, *args)

    return unscale_grads


_unscaling = ProcessWidePatch(replaced_by(replace_unscaling, _make_unscaling))
