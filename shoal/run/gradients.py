"""Operations on all gradients of a local model: add them up over calls, clip them, gather them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shoal.comm.assembly import gather_named_tensors, unshared
from shoal.comm.norm import full_tensor
from shoal.strategies.base import LocalModel
from shoal.strategies.local_step import gradient_norm, scale_gradients


def detach_gradients(local_model: LocalModel) -> dict[nn.Parameter, Tensor]:
    """Return copies of the gradients of earlier calls, and set each `.grad` to None.

    A strategy reduces all that lies in `.grad`, and the gradients of earlier calls are global means
    already. So they wait outside until `add_gradients`. The result is empty after `zero_grad()`.
    """
    local_model.outside_step.settle_gradients()
    # Copies, because a gradient may be a view of a bucket that this call fills again.
    earlier = {
        p: p.grad.clone() for p in local_model.trainable_params.values() if p.grad is not None
    }
    for parameter in earlier:
        parameter.grad = None
    return earlier


def add_gradients(earlier: Mapping[nn.Parameter, Tensor]) -> None:
    """Add the gradients that `detach_gradients` returned to those of this call."""
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def clip_gradients(local_model: LocalModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`. Collective.

    Returns: the norm before, a scalar tensor.
    """
    if local_model.remote_optimizer is not None:
        norm = local_model.remote_optimizer.norm(norm_type)
    else:
        parameters = local_model.trainable_params.items()
        gradients = {name: p.grad for name, p in parameters if p.grad is not None}
        norm = gradient_norm(local_model, gradients, norm_type)
    # The same small constant as in torch.nn.utils.clip_grad_norm_: no division by zero.
    scale_gradients(local_model, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def gather_gradients(local_model: LocalModel) -> dict[str, Tensor | None]:
    """Return the full gradient of every trainable parameter of the full model. Collective.

    A parameter without a gradient has None. The others are copies.
    """
    if local_model.remote_optimizer is not None:
        return local_model.remote_optimizer.gradients()
    stage_gradients = {
        name: None if parameter.grad is None else full_tensor(parameter.grad)
        for name, parameter in local_model.trainable_params.items()
    }
    full = gather_named_tensors(local_model.pipeline.axis, stage_gradients)
    held = (p.grad for p in local_model.trainable_params.values())
    return unshared(full, (gradient for gradient in held if gradient is not None))
