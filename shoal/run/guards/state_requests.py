"""`state_dict()` of prepared models and optimizers: whole, or an error that names the cure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.run.guards.call_site import call_site
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook, Removable, is_shard
from shoal.run.state_access import is_access_by_shoal

_SAVE = "Use run.save(path), or run.weights(), on all ranks."


def guard_state_requests(guarded: GuardedModels) -> Iterator[Removable]:
    """Register hooks on the `state_dict` of models, submodules and optimizers; yield handles."""
    for prefix, model in guarded.models.items():
        for name, module in model.named_modules():
            if own_parameters(module) or own_buffers(module):
                path = f"{prefix}{name}." if name else prefix
                hook = ModuleHook(partial(_check_model_state, guarded, path))
                yield module.register_state_dict_pre_hook(hook)
    for optimizer in guarded.optimizers:
        yield optimizer.register_state_dict_pre_hook(partial(_check_optimizer_state, guarded))


def _check_model_state(guarded: GuardedModels, path: str, module: nn.Module, *_: Any) -> None:
    """Raise UsageError if this rank lacks a part of what the module owns."""
    if is_access_by_shoal():
        return
    for tensors in (own_parameters(module), own_buffers(module)):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.is_meta:
                where = f"{path}{name} is in another rank's stage"
            elif is_shard(tensor):
                where = f"each rank holds a shard of {path}{name}"
            else:
                continue
            raise UsageError(f"model.state_dict(){call_site()}{guarded.under}: {where}. {_SAVE}")
    state = guarded.local_model.strategy_state
    if guarded.local_model.remote_optimizer is not None:
        if not state.is_synchronous:
            raise UsageError(
                f"model.state_dict(){call_site()}{guarded.under}: ranks hold weights of different "
                f"steps. {_SAVE}"
            )
        state.wait()  # the values of the last step may still arrive


def _check_optimizer_state(guarded: GuardedModels, optimizer: Optimizer) -> None:
    """Raise UsageError if this rank lacks a part of the optimizer's state."""
    if is_access_by_shoal():
        return
    local_model = guarded.local_model
    where = ""
    if local_model.remote_optimizer is not None:
        where = "the servers hold the state"
    elif local_model.is_partial:
        where = "this rank holds the state of its own stage"
    elif any(is_shard(p) for group in optimizer.param_groups for p in group["params"]):
        where = "each rank holds shards of the state"
    if where:
        raise UsageError(
            f"optimizer.state_dict(){call_site()}{guarded.under}: {where}. Use run.state() and "
            "run.load_state(...), on all ranks; shoal.Checkpoints writes what run.state() returns."
        )
