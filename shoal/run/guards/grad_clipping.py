"""`clip_grad_norm_` and `clip_grad_value_` on prepared parameters.

every rank has whole gradients   torch's own
shards, all or some              the norm over all ranks; torch's loop over single tensors
stages of a pipeline             each stage clips values; of a norm, an error that names
                                 `run.clip_gradients`
servers                          the same error, by `absent_values.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.comm.norm import full_tensor, global_norm
from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.replaced_functions import TOTAL_NORM, USES_LISTS
from shoal.run.guards.absent_values import is_absent
from shoal.run.guards.guarded_models import GuardedModels, ProcessWidePatch, replaced


def guard_clipping(guarded: GuardedModels, undo: ExitStack) -> None:
    """Replace torch's norm and its choice of a loop where they would be wrong, until `undo` is
    closed.
    """
    local_model = guarded.local_model
    if local_model.is_divided:
        _total_norm.add(guarded, undo)
    if guarded.absent_gradients or local_model.has_sharded_params:
        _uses_lists.add(guarded, undo)


def _make_total_norm(patch: ProcessWidePatch, original: Any) -> Any:
    @torch.no_grad()
    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        guarded = _owner_of(given, patch)
        if guarded is not None and guarded.local_model.is_partial:
            raise UsageError(
                f"clip_grad_norm_{call_site()}{guarded.under}: this rank has the gradients of its "
                "own stage, and would clip by their norm alone. Use "
                "run.clip_gradients(max_norm) instead."
            )
        for gradient in filter(is_absent, given):  # all are, where this stage has none of them
            raise gradient.absence.refusal("clip_grad_norm_")
        if guarded is None or not any(isinstance(tensor, DTensor) for tensor in given):
            whole: Tensor = original(given, norm_type, error_if_nonfinite, foreach)
            return whole
        norm = _norm_of_shards(given, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: not finite.")
        return norm

    return total_norm


def _norm_of_shards(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all entries of all tensors, a plain scalar. Collective."""
    if norm_type in (2.0, torch.inf):
        return global_norm(tensors, norm_type)
    norms = [full_tensor(torch.linalg.vector_norm(tensor, norm_type)) for tensor in tensors]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _make_uses_lists(_: ProcessWidePatch, original: Callable[..., bool]) -> Any:
    def uses_lists(tensors: Sequence[Any], device: Any) -> bool:
        absent = [tensor for tensor in tensors if is_absent(tensor)]
        for gradient in absent:
            if not gradient.absence.is_in_stage:  # before any other gradient is clipped
                raise gradient.absence.refusal("clipping")
        if absent:
            return False
        meshes = {tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors}
        # torch takes no lists that mix tensors of several meshes, and plain ones.
        return len(meshes) == 1 and original(tensors, device)

    return uses_lists


def _owner_of(gradients: Sequence[Tensor], patch: ProcessWidePatch) -> GuardedModels | None:
    """Return the prepared models that own one of the gradients."""
    ids = {id(gradient) for gradient in gradients}
    for guarded in patch.active:
        owned = guarded.local_model.trainable_params.values()
        if any(id(parameter.grad) in ids for parameter in owned if parameter.grad is not None):
            return guarded
    return None


_total_norm = replaced(TOTAL_NORM, _make_total_norm)
_uses_lists = replaced(USES_LISTS, _make_uses_lists)
