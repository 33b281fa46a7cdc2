"""`torch.amp.GradScaler` on prepared optimizers.

every rank has whole gradients   torch's own
shards, stages                   this rank's parts are unscaled; all ranks agree if one is infinite
servers, steps in the backward   an error that names the cure
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.comm.norm import to_local
from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.replaced_functions import replace_unscaling
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch, replaced_by


def guard_grad_scalers(guarded: GuardedModels) -> Iterator[Removable]:
    """Replace what a GradScaler does with gradients where it would be wrong; yield a handle."""
    local_model = guarded.local_model
    if (
        local_model.is_partial
        or local_model.has_sharded_params
        or local_model.remote_optimizer is not None
        or guarded.steps_in_backward
    ):
        yield _unscaling.add(guarded)


def _make_unscaling(patch: ProcessWidePatch, original: Any) -> Any:
    def unscale_grads(
        scaler: Any, optimizer: Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        guarded = next((g for g in patch.active if optimizer in g.optimizers), None)
        if guarded is None:
            unchanged: dict[torch.device, Tensor] = original(
                scaler, optimizer, inverse, found, allow_fp16
            )
            return unchanged
        _check_has_gradients(guarded)
        return _unscale_parts(guarded, optimizer, inverse, allow_fp16)

    return unscale_grads


def _check_has_gradients(guarded: GuardedModels) -> None:
    where = ""
    if guarded.local_model.remote_optimizer is not None:
        where = f"{guarded.under}: the servers have the gradients, multiplied by its scale"
    elif guarded.steps_in_backward:
        where = ": with step_in_backward the gradients have been used, multiplied by its scale"
    if where:
        raise UsageError(
            f"GradScaler{call_site()}{where}. Leave it out, or give it enabled=False; "
            'bfloat16 needs none: shoal.init(..., precision="bf16").'
        )


@torch.no_grad()
def _unscale_parts(
    guarded: GuardedModels, optimizer: Optimizer, inverse: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Multiply this rank's parts of the gradients by a number. Collective.

    Returns: by device, 1 if a gradient was not finite on any rank; the same on all ranks.
    """
    owned = {id(parameter) for parameter in guarded.local_model.trainable_params.values()}
    # torch takes this number in float32 only, whatever the default is.
    flag = torch.zeros((), device=guarded.mesh.device, dtype=torch.float32)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in owned or parameter.grad is None:
            continue
        if parameter.grad.dtype == torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        part = to_local(parameter.grad)
        numbers = part.values() if part.is_sparse else part
        flag = torch.maximum(flag, (~torch.isfinite(numbers).all()).to(flag))
        numbers.mul_(inverse.to(numbers.device))
    found = guarded.mesh.all_reduce_max(flag.reshape(1)).reshape(())
    return {inverse.device: found.to(inverse.device)}


_unscaling = ProcessWidePatch(replaced_by(replace_unscaling, _make_unscaling))
