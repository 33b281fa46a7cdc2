"""A shard that loses its primary again and again, each time after the last loss was repaired, and
the coordinator with the first one."""

import os
import re
import signal
from typing import Any

import pytest
import torch
from fault_injection import check, model, steps, trained
from torch import Tensor

import shoal
from shoal.testing import world

LOSSES_AFTER = (8, 16, 24)  # steps
NOTE = (
    r"note: the server of shard 1 \(process \d+\) was killed by SIGKILL; its backup takes over, "
    "and another is started"
)
COORDINATORS = r"note: the servers' coordinator \(process \d+\) was killed by SIGKILL; another is"


def loses_three(strategy: str) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[int]]:
    """Train as `fault_injection.trained`, and return the killed primaries of shard 1 too."""
    torch.manual_seed(0)
    run, net = shoal.init(strategy, announce=lambda _: None), model()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    part: Any = run._local_model()
    killed: list[int] = []
    count = 0

    def strike(*_: Any) -> None:
        nonlocal count
        count += 1
        if run.rank == 0 and count == LOSSES_AFTER[0]:
            os.kill(part.remote_optimizer.launcher.pool.coordinator.pid, signal.SIGKILL)
        if run.rank == 0 and count in LOSSES_AFTER:
            fleet = part.remote_optimizer.launcher.pool
            view = fleet.watcher.wait_for_view(
                1, 20, lambda view: bool(view.backups) and view.primary not in killed
            )
            assert view is not None, f"shard 1 has no replica again after {killed}"
            killed.append(view.primary)
            pid = next(p for p, config in fleet.servers.items() if config.server == view.primary)
            os.kill(pid, signal.SIGKILL)

    optimizer.register_step_post_hook(strike)
    steps(run, net, optimizer)
    return run.weights(), part.remote_optimizer.client.stats(), killed


def test_three_losses_of_a_shard_and_that_of_the_coordinator_are_told_and_change_no_bit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    undisturbed = world.run(2, trained, "server=2,part_mb=0.01")[0][0]
    found = world.run(2, loses_three, "server=2,replicas=2,part_mb=0.01,lease_s=0.5")
    assert len(set(found[0][2])) == 3
    check([(weights, figures) for weights, figures, _ in found], undisturbed)
    said = capfd.readouterr().err
    assert len(re.findall(NOTE, said)) == said.count("note: the server ") == 3
    assert len(re.findall(COORDINATORS, said)) == 1
