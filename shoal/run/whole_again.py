"""Models and optimizers whole again on every rank, so that the strategies can be applied anew.

state of the strategy ──> state of optimizers, by name ──> OutsideStep.close ──> optimizers are
comes out                 whole                            whole models          bound to these
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.comm.assembly import gather_named_values
from shoal.comm.norm import full_tensor
from shoal.run.optimizer_binding import bind_optimizer
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
    stepping: Collection[Optimizer],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make the models and the optimizers what they would be on one device. Collective.

    Args:
        root: the models as they are shown, new ones too.
        names: of the parameters in `root`.
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
    local_model.outside_step.close()
    whole = dict(root.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        _bind_to_whole(optimizer, groups, whole)
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
