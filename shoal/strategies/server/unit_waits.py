"""Waits of the forward pass for new values: each unit waits only for the values that it reads.

pull      layer 1 ──┐   layer 2 ──┐   layer 3 ──┐       in the order of the forward pass
forward   waits     1   waits     2   waits     3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.strategies.wrap_units import units


def register_unit_waits(
    module: nn.Module,
    client: WorkerClient,
    flat: FlatParams,
    parts_of: Mapping[str, Sequence[int]],
) -> None:
    """Register a forward hook on each wrap unit of `module`, and on `module` itself.

    Args: parts_of: parameter name -> numbers of its partitions.
    """
    names = {id(parameter): name for name, parameter in flat.parameters.items()}
    remaining = set(flat.parameters)
    for unit in [*reversed(units(module).values()), module]:  # inner units first
        inside = [names[id(p)] for p in unit.parameters() if id(p) in names]
        inside = [name for name in inside if name in remaining]
        remaining -= set(inside)
        numbers = sorted({number for name in inside for number in parts_of[name]})
        unit.register_forward_pre_hook(_wait_hook(client, flat, inside, numbers))


def _wait_hook(
    client: WorkerClient, flat: FlatParams, names: Sequence[str], numbers: Sequence[int]
) -> Any:
    """Return a hook that waits for the partitions `numbers`, with the parameters `names`."""

    def wait(*_: Any) -> None:
        client.wait(numbers)
        flat.copy_to_params(names)

    return torch.compiler.disable(wait)
