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


def post_forward(unit: nn.Module, output: Any) -> None:
    """End a forward pass of a unit that was not called: free its weights.

    Why and without: see pre_forward. Checked: 2.13.
    """
    engine: Any = unit
    engine._get_fsdp_state()._post_forward(unit, (), output)
