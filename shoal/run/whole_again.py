"""Models and optimizers whole again on every rank, so that the strategies can be applied anew.

state of the strategy ──> state of optimizers, by name ──> OutsideStep.close ──> optimizers are
comes out                 whole, of all stages             whole models          bound to these
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.comm.assembly import gather_named_tensors, gather_named_values
from shoal.comm.norm import full_tensor
from shoal.run.bound_groups import BoundGroups
from shoal.run.optimizer_binding import bind_optimizer, optimizer_state, state_by_name
from shoal.run.optimizer_groups import params_of
from shoal.strategies.base import LocalModel

Names = Sequence[list[list[str]]]
"""For each optimizer and group the names of its parameters, the same on every rank."""


def agree_on_trained(root: nn.Module, local_model: LocalModel) -> None:
    """Let parameters of other ranks require gradients if they do where they are. Collective in a
    pipeline.

    A script may have frozen or thawed a layer by parameters that it holds since before the model
    was divided. Only the rank whose stage has the layer sees that.
    """
    axis = local_model.pipeline.axis
    if axis is None:
        return
    aliases = local_model.pipeline.tied_names
    own = {
        aliases.get(name, name): parameter.requires_grad
        for name, parameter in local_model.module.named_parameters()
    }
    flags = gather_named_values(axis, own)
    for name, parameter in root.named_parameters():
        parameter.requires_grad = flags.get(name, parameter.requires_grad)


def make_whole(
    local_model: LocalModel,
    root: nn.Module,
    optimizers: Sequence[Optimizer],
    names: Names,
    bound: BoundGroups,
    stepping: Collection[Optimizer],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make the models and the optimizers what they would be on one device. Collective.

    Args:
        root: the models as they are shown, new ones too.
        names: of the parameters in `root`.
        bound: knows which of them a parameter of an optimizer is.
        stepping: optimizers that have stepped the local model.

    Returns: the state of the strategy, as its `state_dict` and `rank_state_dict` have it.
    """
    # State comes out before `close`, which ends the servers that hold it.
    state = local_model.strategy_state
    state.synchronize()
    for optimizer in optimizers:
        if optimizer in stepping:  # it goes on, so its state does too
            state.pull_state(optimizer)
    saved = state.state_dict(), state.rank_state_dict()
    names_by_id = {id(parameter): name for name, parameter in root.named_parameters()}
    states = [
        _gathered_state(optimizer, local_model, names_by_id, bound)
        if local_model.is_partial
        else None
        for optimizer in optimizers
    ]
    local_model.outside_step.close()
    whole = dict(root.named_parameters())
    for optimizer, groups, found in zip(optimizers, names, states, strict=True):
        if found is None:
            _bind_to_whole(optimizer, groups, whole)
        else:
            _give_state(optimizer, groups, whole, found)
    return saved


def _bind_to_whole(
    optimizer: Optimizer, groups: list[list[str]], whole: Mapping[str, nn.Parameter]
) -> None:
    """Bind an optimizer to whole parameters again, and make its state whole. Collective."""
    for parameter in params_of(optimizer):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, DTensor):
                state[key] = full_tensor(value)
    bind_optimizer(optimizer, groups, whole)


def _gathered_state(
    optimizer: Optimizer,
    local_model: LocalModel,
    names_by_id: Mapping[int, str],
    bound: BoundGroups,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state of all stages, as `optimizer_state` does. Collective."""
    own = {
        names_by_id[id(bound.shown(parameter))]: parameter
        for parameter in params_of(optimizer)
        if isinstance(parameter, nn.Parameter) and not parameter.is_meta
    }
    tensors, scalars = optimizer_state(optimizer, own)
    axis = local_model.pipeline.axis
    whole = {path: full_tensor(tensor) for path, tensor in tensors.items()}
    gathered = {
        path: tensor
        for path, tensor in gather_named_tensors(axis, whole).items()
        if tensor is not None
    }
    return gathered, gather_named_values(axis, scalars)


def _give_state(
    optimizer: Optimizer,
    groups: list[list[str]],
    whole: Mapping[str, nn.Parameter],
    found: tuple[dict[str, Tensor], dict[str, Any]],
) -> None:
    """Bind an optimizer to whole parameters, and give it the state of all of them.

    Args: found: what `_gathered_state` has returned.
    """
    for parameter in params_of(optimizer):
        optimizer.state.pop(parameter, None)
    keeps_on_device = any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups)
    tensors, scalars = found
    for name, values in state_by_name(optimizer, whole, tensors, scalars).items():
        for key, value in values.items():
            if isinstance(value, Tensor) and not value.dim() and not keeps_on_device:
                values[key] = value.cpu()  # a count of steps, as the optimizer makes it
        optimizer.state[whole[name]] = values
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [whole[name] for name in members]
