"""The client of a worker that is replayed: it needs no process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.optimizer_spec import recipe_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.recorded_order import ReplayClient
from shoal.parameter_server.worker.flat_params import FlatParams

LENGTH = 4


def replayed(held: list[PartitionState]) -> ReplayClient:
    """A client of one part, whose values are ones."""
    parameter = nn.Parameter(torch.ones(LENGTH))
    flat = FlatParams(
        {"weight": parameter}, partition({"weight": ParamMeta(LENGTH, torch.float32, 0)})
    )
    recipe = recipe_of(torch.optim.SGD([parameter], lr=0.5, momentum=0.9))
    return ReplayClient(flat, recipe, held, None)


def test_a_step_shows_what_was_pushed_and_needs_no_answer() -> None:
    client = replayed([])
    gradient = torch.arange(float(LENGTH))
    client.push(0, gradient, b"\1")
    client.request_step(StepRequest([{"lr": 0.1}], 0.3))
    client.wait([0])
    stepped = client.stepped()
    assert stepped.gradients[0] == (gradient, b"\1")
    assert stepped.order == StepRequest([{"lr": 0.1}], 0.3)
    with pytest.raises(UsageError, match="pushed nothing, or not everything"):
        client.stepped()
