"""Servers that are replayed: a worker's client finds what it needs without any process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.optimizer_spec import recipe_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.recorded_order import ReplayedServers
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams

LENGTH = 4


def replayed(held: list[PartitionState]) -> tuple[WorkerClient, ReplayedServers]:
    """A client of one part, whose values are ones."""
    parameter = nn.Parameter(torch.ones(LENGTH))
    flat = FlatParams(
        {"weight": parameter}, partition({"weight": ParamMeta(LENGTH, torch.float32, 0)})
    )
    recipe = recipe_of(torch.optim.SGD([parameter], lr=0.5, momentum=0.9))
    servers = ReplayedServers(flat, recipe, held, None)
    return WorkerClient(flat, servers, None), servers


def test_a_step_shows_what_was_pushed_and_needs_no_answer() -> None:
    client, servers = replayed([])
    gradient = torch.arange(float(LENGTH))
    client.push(0, gradient, b"\1")
    client.request_step(StepRequest([{"lr": 0.1}], 0.3))
    client.wait([0])
    stepped = servers.stepped()
    assert stepped.gradients[0] == (gradient, b"\1")
    assert stepped.order == StepRequest([{"lr": 0.1}], 0.3)
    with pytest.raises(UsageError, match="pushed nothing, or not everything"):
        servers.stepped()


def test_all_workers_have_the_same_parts() -> None:
    held: list[PartitionState] = []
    first, _ = replayed(held)
    second, servers = replayed(held)
    first.load([[{"momentum_buffer": torch.full((LENGTH,), 2.0)}]])
    assert torch.equal(second.state(0)[0]["momentum_buffer"], torch.full((LENGTH,), 2.0))
    held[0].values.fill_(3.0)
    second.pull()
    assert torch.equal(second.values[0], torch.full((LENGTH,), 3.0))
    servers.take(0, torch.zeros(LENGTH))
    assert torch.equal(second.values[0], torch.zeros(LENGTH))
    assert torch.equal(first.values[0], torch.ones(LENGTH))


def test_what_is_only_known_while_it_happens_cannot_be_asked() -> None:
    client, _ = replayed([])
    with pytest.raises(UsageError, match="has no servers to ask for STATS"):
        client.stats()
