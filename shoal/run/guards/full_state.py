"""Full state of prepared models and optimizers: asked for by a script, or given by one.

model.state_dict()                   an error where this rank lacks a part, which names the cure
model.load_state_dict(full)          weights are cut into shards; other stages' are left out
optimizer.state_dict(), load_state_dict(...)   errors where it lacks a part of the state
optimizer state from before prepare  moves with its parameter
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.assembly import shard_like
from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook
from shoal.run.optimizer_binding import is_shard
from shoal.run.state_access import is_access_by_shoal

SAVE = "Use run.save(path), run.save_pretrained(directory) or run.weights(), on all ranks."


def guard_state_requests(guarded: GuardedModels, undo: ExitStack) -> None:
    """Look at each `state_dict` of models, submodules and optimizers, until `undo` is closed."""
    for path, module in guarded.modules():
        if own_parameters(module) or own_buffers(module):
            hook = ModuleHook(partial(_check_model_state, guarded, path))
            undo.callback(module.register_state_dict_pre_hook(hook).remove)
    for optimizer in guarded.optimizers:
        for register, call in (
            (optimizer.register_state_dict_pre_hook, "state_dict()"),
            (optimizer.register_load_state_dict_pre_hook, "load_state_dict()"),
        ):
            undo.callback(register(partial(_check_optimizer_state, guarded, call)).remove)


def _check_model_state(guarded: GuardedModels, path: str, module: nn.Module, *_: Any) -> None:
    """Raise UsageError if this rank lacks a part of what the module owns.

    Args: path: of the module in names of parameters, with a dot at its end.
    """
    if is_access_by_shoal():
        return
    call = f"model.state_dict(){call_site()}{guarded.under}"
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
            raise UsageError(f"{call}: {where}. {SAVE}")
    state = guarded.local_model.strategy_state
    if guarded.local_model.remote_optimizer is not None:
        if not state.is_synchronous:
            raise UsageError(f"{call}: ranks hold weights of different steps. {SAVE}")
        state.wait()  # the values of the last step may still arrive


def _check_optimizer_state(
    guarded: GuardedModels, call: str, optimizer: Optimizer, *_: Any
) -> None:
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
            f"optimizer.{call}{call_site()}{guarded.under}: {where}. Use run.state() and "
            "run.load_state(...), on all ranks; shoal.Checkpoints writes what run.state() returns."
        )


def cut_given_weights(guarded: GuardedModels, undo: ExitStack) -> None:
    """Make `load_state_dict` of the models and their submodules take full tensors, until `undo` is
    closed.
    """
    for _, module in guarded.modules():
        if own_parameters(module) or own_buffers(module):
            hook = ModuleHook(partial(_cut_weights, guarded))
            undo.callback(module.register_load_state_dict_pre_hook(hook).remove)


def _cut_weights(
    guarded: GuardedModels, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Replace full tensors by this rank's shards, and by nothing where another rank has them."""
    given_values: list[Tensor] = []
    for tensors in (own_parameters(module), own_buffers(module)):
        for name, tensor in tensors.items():
            given = state.get(prefix + name)
            if tensor is None or not isinstance(given, Tensor) or given.shape != tensor.shape:
                continue
            given_values.append(given)
            if tensor.is_meta:
                state[prefix + name] = tensor.detach()
            else:
                state[prefix + name] = shard_like(given, tensor)
    if not is_access_by_shoal():
        guarded.phase.note_loaded(given_values)
