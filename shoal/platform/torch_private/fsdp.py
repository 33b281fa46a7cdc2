"""FSDP2's engine from inside, and a shard of a slice."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard

# Why: a parameter that is cut along dimension 0 by tensor parallelism first and by ZeRO then lies
# in strides; FSDP2 makes such placements itself. Without: no strategy zero with tensor on one
# dimension. Checked: 2.13.
StridedShard = _StridedShard


def pre_forward(unit: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Begin a forward pass of a unit without calling it; return the named inputs as it sees them.

    Its weights are gathered.

    Why: ranks that do not call a unit must take part in its collectives, and FSDP2 begins them in
    this hook only. Without: ranks whose samples take another branch would wait for ever.
    Checked: 2.13.
    """
    engine: Any = unit
    _, found = engine._get_fsdp_state()._pre_forward(unit, (), options)
    return dict(found)


def post_forward(unit: nn.Module, output: Any) -> Any:
    """End a forward pass of a unit that was not called: free its weights. Return the output.

    Why and without: see pre_forward. Checked: 2.13.
    """
    engine: Any = unit
    return engine._get_fsdp_state()._post_forward(unit, (), output)


def is_gathered(unit: nn.Module) -> bool:
    """Return True if the weights of a unit are whole on this rank, or if it has none.

    Why: with tensor parallelism whole weights are DTensors too, so their class does not tell.
    Without: a second run of a unit would free weights that a gradient of a gradient still needs.
    Checked: 2.13.
    """
    engine: Any = unit
    group = engine._get_fsdp_state()._fsdp_param_group
    return group is None or bool(group.is_unsharded)


def reset_after_error(root: nn.Module) -> None:
    """Free all weights after a forward pass that has failed, so that the next one begins anew.

    Why: FSDP2 notes for each unit that it is in a forward pass, and an exception leaves the note
    behind. Without, where torch has no such function: after an error that the user has caught, the
    units that were running are reduced late. Checked: 2.13.
    """
    engine: Any = root
    reset = getattr(engine._get_fsdp_state(), "_reset_iter_state", None)
    if reset is not None:
        reset()
