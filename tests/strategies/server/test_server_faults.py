"""Servers killed or stopped in every phase of a step, and one after the other, with real signals:
no loss of state.
"""

import os
import re
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fault_injection import check, model, steps, trained, trials
from faulty_network import PHASES, Trouble
from torch import Tensor

import shoal
from shoal.errors import LaunchError
from shoal.run.supervised import supervised
from shoal.testing import world


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return world.run(2, trained, "server=2,part_mb=0.01")[0][0]


SIGNALS = [
    "SIGKILL primary",
    "SIGKILL backup",
    "SIGKILL coordinator",
    "SIGSTOP primary",
    "SIGSTOP backup",
    "SIGSTOP coordinator",
    "SIGSTOP worker",
]
EVERY_DAY = ("SIGKILL primary", "SIGKILL coordinator", "SIGSTOP primary")


@pytest.mark.parametrize("seed", trials())
@pytest.mark.parametrize(
    "fault", [f if f in EVERY_DAY else pytest.param(f, marks=pytest.mark.slow) for f in SIGNALS]
)
def test_a_run_that_loses_one_process_ends_at_the_bits_of_one_that_does_not(
    fault: str, seed: int, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    chance = Random(f"{fault} {seed}")
    phase = list(PHASES)[(seed + SIGNALS.index(fault)) % len(PHASES)]
    shared = chance.random() < 0.5
    trouble = Trouble(tmp_path, fault, PHASES[phase], chance.randint(1, 30))
    # It goes on before another has taken its place, or after that, or never.
    wakes_s = chance.choice([0.3, 2.0] if fault == "SIGSTOP worker" else [0.3, 2.0, None])
    strategy = f"server=2,replicas=2,part_mb=0.01,lease_s=1,shared_memory={str(shared).lower()}"
    found = world.run(2, trained, strategy, trouble, wakes_s, timeout_s=30)
    assert trouble.mark.exists(), f"nothing happened in {phase}"
    check(found, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["2", "async"])
def test_stale_workers_go_on_as_well(staleness: str, tmp_path: Path) -> None:
    trouble = Trouble(tmp_path, "SIGKILL primary", PHASES["push"], 20)
    strategy = f"server=2,replicas=2,part_mb=0.01,lease_s=1,staleness={staleness}"
    found = world.run(3, trained, strategy, trouble)
    assert trouble.mark.exists()
    for weights, _ in found[1:]:
        assert all(torch.equal(weights[name], value) for name, value in found[0][0].items())


def loses_all(_: str) -> None:
    torch.manual_seed(0)
    run, net = shoal.init("server=1,lease_s=0.5", announce=lambda _: None), model()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
    part: Any = run._local_model()
    for step in range(1000):
        if step == 3 and run.rank == 0:
            fleet = part.remote_optimizer.launcher.pool
            os.kill(next(iter(fleet.servers)), signal.SIGKILL)
        optimizer.zero_grad()
        run.forward_backward(
            supervised(F.cross_entropy, net), torch.ones(2, 20).double(), torch.tensor([1, 2])
        )
        optimizer.step()


def test_the_loss_of_all_replicas_ends_the_run_and_says_what_to_do() -> None:
    with pytest.raises(
        LaunchError, match=r"shard 0 of the parameter servers is lost.*last checkpoint"
    ) as error:
        world.run(2, loses_all, "")
    assert "replicas=2" in str(error.value)


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


@pytest.mark.slow
def test_three_losses_of_a_shard_and_that_of_the_coordinator_are_told_and_change_no_bit(
    undisturbed: dict[str, Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    found = world.run(2, loses_three, "server=2,replicas=2,part_mb=0.01,lease_s=0.5")
    assert len(set(found[0][2])) == 3
    check([(weights, figures) for weights, figures, _ in found], undisturbed)
    said = capfd.readouterr().err
    assert len(re.findall(NOTE, said)) == said.count("note: the server ") == 3
    assert len(re.findall(COORDINATORS, said)) == 1
