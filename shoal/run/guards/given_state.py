"""Full state that a script gives to what is prepared: each rank loads its part.

model.load_state_dict(full)          weights are cut into shards; other stages' are left out
optimizer.load_state_dict(full)      the same for the state of each parameter
optimizer state from before prepare  moves with its parameter
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.shards import shard_like
from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.run.guards.call_site import call_site
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook, Removable
from shoal.run.optimizer_binding import cut_parameter_state
from shoal.run.state_access import is_access_by_shoal


def cut_given_weights(guarded: GuardedModels) -> Iterator[Removable]:
    """Make `load_state_dict` of the models and their submodules take full tensors.

    Yields: handles of hooks.
    """
    for model in guarded.models.values():
        for module in model.modules():
            if own_parameters(module) or own_buffers(module):
                yield module.register_load_state_dict_pre_hook(ModuleHook(_cut_weights))


def _cut_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace full tensors by this rank's shards, and by nothing where another rank has them."""
    for tensors in (own_parameters(module), own_buffers(module)):
        for name, tensor in tensors.items():
            given = state.get(prefix + name)
            if tensor is None or not isinstance(given, Tensor) or given.shape != tensor.shape:
                continue
            if tensor.is_meta:
                state[prefix + name] = tensor.detach()
            else:
                state[prefix + name] = shard_like(given, tensor)


def cut_given_optimizer_state(guarded: GuardedModels) -> Iterator[Removable]:
    """Make `load_state_dict` of the optimizers take the state of a full model.

    Yields: handles of hooks.
    """
    for optimizer, names in zip(guarded.optimizers, guarded.group_names, strict=True):
        yield optimizer.register_load_state_dict_pre_hook(
            partial(_cut_optimizer_state, guarded, names)
        )
        if guarded.local_model.remote_optimizer is not None:
            yield optimizer.register_load_state_dict_post_hook(partial(_push, guarded))


def _cut_optimizer_state(
    guarded: GuardedModels,
    names: Sequence[Sequence[str]],
    optimizer: Optimizer,
    state: dict[str, Any],
) -> dict[str, Any] | None:
    """Return the state of the parameters that this rank owns, counted as this optimizer counts."""
    if is_access_by_shoal() or len(state["param_groups"]) != len(names):
        return None
    owned = guarded.local_model.trainable_params
    for index, (group, members) in enumerate(zip(state["param_groups"], names, strict=True)):
        if len(group["params"]) != len(members):
            raise UsageError(
                f"optimizer.load_state_dict{call_site()}: group {index} of the state has "
                f"{len(group['params'])} parameters, the optimizer's had {len(members)} in "
                "run.prepare. Load the state of the same groups."
            )
    values: dict[int, Any] = {}
    groups = []
    count = 0
    for group, members in zip(state["param_groups"], names, strict=True):
        kept = []
        for old, name in zip(group["params"], members, strict=True):
            if name not in owned:
                continue
            if old in state["state"]:
                parameter = owned[name]
                values[count] = cut_parameter_state(state["state"][old], parameter.shape, parameter)
            kept.append(count)
            count += 1
        groups.append({**group, "params": kept})
    return {**state, "state": values, "param_groups": groups}


def _push(guarded: GuardedModels, optimizer: Optimizer) -> None:
    """Send loaded state to the servers. Collective."""
    if not is_access_by_shoal():
        guarded.local_model.strategy_state.synchronize()
        guarded.local_model.strategy_state.push_state(optimizer)
