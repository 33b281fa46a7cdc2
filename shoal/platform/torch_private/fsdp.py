"""FSDP2's engine from inside, and a shard of a slice."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor.placement_types import _StridedShard

# Why: a parameter that is cut along dimension 0 by tensor parallelism first and by ZeRO then lies
# in strides; FSDP2 makes such placements itself. Without: no strategy zero with tensor on one
# dimension. Checked: 2.11, 2.13, 2.15.
StridedShard = _StridedShard


def pre_forward(unit: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Begin a forward pass of a unit without calling it; return the named inputs as it sees them.

    Its weights are gathered.

    Why: ranks that do not call a unit must take part in its collectives, and FSDP2 begins them in
    this hook only. Without: ranks whose samples take another branch would wait for ever.
    Checked: 2.11, 2.13, 2.15.
    """
    engine: Any = unit
    # A root on a GPU moves its inputs there, and fails if there are none.
    _, found = engine._get_fsdp_state()._pre_forward(unit, (None,), options)
    return dict(found)


def post_forward(unit: nn.Module, output: Any) -> Any:
    """End a forward pass of a unit that was not called: free its weights. Return the output.

    Why and without: see pre_forward. Checked: 2.11, 2.13, 2.15.
    """
    engine: Any = unit
    return engine._get_fsdp_state()._post_forward(unit, (), output)


def is_gathered(unit: nn.Module) -> bool:
    """Return True if the weights of a unit are whole on this rank, or if it has none.

    Why: with tensor parallelism whole weights are DTensors too, so their class does not tell.
    Without: a second run of a unit would free weights that a gradient of a gradient still needs.
    Checked: 2.11, 2.13, 2.15.
    """
    engine: Any = unit
    group = engine._get_fsdp_state()._fsdp_param_group
    return group is None or bool(group.is_unsharded)


def reset_after_error(root: nn.Module) -> None:
    """Free all weights after a forward pass that has failed, so that the next one begins anew.

    Why: FSDP2 notes for each unit that it is in a forward pass, and an exception leaves the note
    behind. Without: after an error that the user has caught, the units that were running are
    reduced late. Checked: 2.11, 2.13, 2.15.
    """
    engine: Any = root
    state = engine._get_fsdp_state()
    reset = getattr(state, "_reset_iter_state", None)
    if reset is not None:
        reset()
    else:  # before 2.13
        _reset(state)


def _reset(root: Any) -> None:
    """Do the same with the notes of torch 2.11, which has no function for it."""
    shared, communication = root._state_ctx, root._comm_ctx
    communication.all_gather_state = None
    communication.post_forward_order.clear()
    if communication.reduce_scatter_state is not None:
        root._device_handle.current_stream().wait_event(communication.reduce_scatter_state.event)
        communication.reduce_scatter_state = None
    for unit in shared.all_states:
        unit._modules_to_run_forward.clear()
        unit._training_state = TrainingState.IDLE
        group = unit._fsdp_param_group
        if group is not None:
            group.finalize_backward()  # waits for gathers that nobody has waited for
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
