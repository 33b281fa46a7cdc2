"""Full state of prepared models and optimizers: asked for by a script, or given by one.

model.state_dict()                   an error where this rank lacks a part, which names the cure;
                                     so for model.save_pretrained(), which calls it
model.load_state_dict(full)          weights are cut into shards; other stages' are left out
optimizer.state_dict(), load_state_dict(...)   errors where it lacks a part of the state
optimizer state from before prepare  moves with its parameter

A script may ask for it after hours of training, so its source is searched beforehand.
"""

from __future__ import annotations

import ast
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.assembly import shard_like
from shoal.comm.tensor_digest import tensor_digest
from shoal.errors import UsageError
from shoal.platform.script_line import call_site, caller, script_frame
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook
from shoal.run.optimizer_binding import is_shard
from shoal.run.state_access import is_access_by_shoal

STATE = (
    "Use run.state() and run.load_state(...), on all ranks; shoal.Checkpoints writes what "
    "run.state() returns."
)
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


def note_state_requests(guarded: GuardedModels) -> None:
    """Name the lines of the script that ask for state of which this rank has a part."""
    frame = script_frame(caller(), with_packages=False)
    if frame is None:
        return
    own = getattr(frame.f_locals.get("self"), "__dict__", {})
    for name, held in {**frame.f_globals, **own, **frame.f_locals}.items():
        if any(held is model for model in guarded.models.values()):
            modules = (
                (f"{path}." if path else "", module) for path, module in held.named_modules()
            )
            missing = (_missing_of_module(guarded, *each) for each in modules)
            where, cure = next(filter(None, missing), ""), SAVE
        elif any(held is optimizer for optimizer in guarded.optimizers):
            where, cure = _missing_of_state(guarded, held), STATE
        else:
            continue
        for method in ("state_dict", "save_pretrained") if where else ():
            if lines := _calls_of(frame.f_code.co_filename, name, method):
                call = f"note: {name}.{method}() in {', '.join(lines)}{guarded.under} is refused"
                guarded.note_once(f"{call} where {name} is what was prepared: {where}. {cure}")


def _calls_of(path: str, name: str, method: str) -> list[str]:
    """Return lines of a source file that call a method of a variable of this name."""
    try:
        source = Path(path).read_text(encoding="utf-8")
        if f"{name}.{method}(" not in source:  # to parse a script takes a tenth of a second
            return []
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return []
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = {
        call.lineno
        for call in calls
        if isinstance(call, ast.Attribute)
        and call.attr == method
        and name in (getattr(call.value, "id", ""), getattr(call.value, "attr", ""))
    }
    return [f"{Path(path).name}:{line}" for line in sorted(found)]


def _check_model_state(guarded: GuardedModels, path: str, module: nn.Module, *_: Any) -> None:
    """Raise UsageError if this rank lacks a part of what the module owns.

    Args: path: of the module in names of parameters, with a dot at its end.
    """
    if is_access_by_shoal():
        return
    where = _missing_of_module(guarded, path, module)
    if where:
        raise UsageError(f"model.state_dict(){call_site()}{guarded.under}: {where}. {SAVE}")
    if guarded.local_model.remote_optimizer is not None:
        guarded.local_model.strategy_state.wait()  # the values of the last step may still arrive


def _missing_of_module(guarded: GuardedModels, path: str, module: nn.Module) -> str:
    """Return what this rank lacks of what a module itself owns; "" for nothing."""
    for tensors in (own_parameters(module), own_buffers(module)):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                return f"{path}{name} is in another rank's stage"
            if tensor is not None and is_shard(tensor):
                return f"each rank holds a shard of {path}{name}"
    is_remote = guarded.local_model.remote_optimizer is not None
    if is_remote and not guarded.local_model.strategy_state.is_synchronous:
        return "ranks hold weights of different steps"
    return ""


def _check_optimizer_state(
    guarded: GuardedModels, call: str, optimizer: Optimizer, *_: Any
) -> None:
    """Raise UsageError if this rank lacks a part of the optimizer's state."""
    where = "" if is_access_by_shoal() else _missing_of_state(guarded, optimizer)
    if where:
        raise UsageError(f"optimizer.{call}{call_site()}{guarded.under}: {where}. {STATE}")


def _missing_of_state(guarded: GuardedModels, optimizer: Optimizer) -> str:
    """Return what this rank lacks of an optimizer's state; "" for nothing."""
    if guarded.local_model.remote_optimizer is not None:
        return "the servers hold the state"
    if guarded.local_model.is_partial:
        return "this rank holds the state of its own stage"
    if any(is_shard(p) for group in optimizer.param_groups for p in group["params"]):
        return "each rank holds shards of the state"
    return ""


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
        digests = [int(tensor_digest(value)) for value in given_values]
        guarded.phase.loaded = hash((guarded.phase.loaded, *digests))
