"""Strangers that connect to a training job are refused and counted, and change no weight."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import fault_injection
import pytest
import torch
from connected_channels import needs_tls
from hostile_clients import WITH_KEY, WITHOUT_KEY, Target, cut_a_frame_short
from torch import Tensor

import shoal
from shoal.parameter_server.coordinator.coordinator_server import COORDINATOR
from shoal.parameter_server.launcher import ClusterLauncher
from shoal.parameter_server.transport.acceptor import HANDSHAKES
from shoal.parameter_server.transport.settings import UNIX
from shoal.testing import world


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return world.run(2, fault_injection.trained, "server=2,part_mb=0.01")[0][0]


def visited(network: str, seed: int) -> tuple[dict[str, Tensor], list[int], list[str], bool]:
    """Return weights, refusals by shard, the report, and if all servers are the first ones."""
    if network == "tls":  # as if the two ranks were on two machines
        ClusterLauncher._listen_host = lambda _: "127.0.0.1"  # type: ignore[method-assign]
    torch.manual_seed(0)
    run, net = shoal.init("server=2,part_mb=0.01", announce=lambda _: None), fault_injection.model()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    part: Any = run._local_model()
    client, fleet = part.remote_optimizer.client, part.remote_optimizer.launcher.pool
    # Before the strangers come: a rank whose handshake they crowd out connects again, and is
    # counted.
    client.stats()
    run.mesh.barrier()
    before = [] if fleet is None else [*fleet.servers, fleet.coordinator.pid]
    with contextlib.ExitStack() as silent, ThreadPoolExecutor(1) as pool:
        if fleet is not None:
            assert (fleet.coordinator_address[0] == UNIX) == (network == "unix")
        visits = pool.submit(visit, fleet, Random(seed), silent) if run.rank == 0 else None
        fault_injection.steps(run, net, optimizer)
        if visits is not None:
            visits.result()
    run.mesh.barrier()
    expected = len(WITHOUT_KEY + WITH_KEY) + HANDSHAKES + 10
    while any(figure["refused"] < expected for figure in client.stats()):
        time.sleep(0.01)  # those that said nothing are counted when they have gone
    return (
        run.weights(),
        [figure["refused"] - expected for figure in client.stats()],
        run.report(),
        before == ([] if fleet is None else [*fleet.servers, fleet.coordinator.pid]),
    )


def visit(fleet: Any, chance: Random, silent: contextlib.ExitStack) -> None:
    """Connect each hostile client to every server, and those without a key to the coordinator."""
    views = [
        fleet.watcher.wait_for_view(shard, 5, lambda view: view.primary is not None)
        for shard in range(2)
    ]
    transport = fleet.job.transport
    servers = [Target(view.addresses[view.primary], transport, view.primary) for view in views]
    coordinator = Target(fleet.coordinator_address, transport, COORDINATOR)
    for target in servers:
        for _ in range(HANDSHAKES + 10):  # half-open, while all others come
            silent.enter_context(target.reach())
    visits = [(who, target) for who in WITHOUT_KEY for target in [*servers, coordinator]]
    visits += [(who, target) for who in WITH_KEY for target in servers]
    chance.shuffle(visits)
    for who, target in visits:
        who(target, chance)
        cut_a_frame_short(chance.choice(servers))


@pytest.mark.parametrize("network", ["unix", pytest.param("tls", marks=needs_tls)])
@pytest.mark.parametrize("seed", fault_injection.trials())
def test_strangers_are_refused_and_counted_and_change_nothing(
    network: str, seed: int, undisturbed: dict[str, Tensor]
) -> None:
    for weights, more, report, same in world.run(2, visited, network, seed):
        assert same
        assert more == [0, 0]
        assert any("servers refused" in line for line in report)
        assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())
