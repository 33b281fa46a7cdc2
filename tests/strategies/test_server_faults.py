"""Servers that are killed or stopped while they are used: real processes, real signals, seeded; nothing is lost."""

import os
import signal
import threading
import time
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import LaunchError
from shoal.testing import world

STEPS = 60
TRIALS = int(os.environ.get("SHOAL_FAULT_TRIALS", "2"))
"""Of each fault; `make test-faults` sets it to 20."""


class Gap:
    """The longest time between two steps of this rank, in seconds."""

    def __init__(self) -> None:
        self.longest_s, self._last = 0.0, time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def trained(strategy: str, fault: str = "", seed: int = 0) -> tuple[dict[str, Tensor], float, list[str]]:
    """Weights after some steps with one fault in the middle, the longest pause, and what happened to whom."""
    torch.manual_seed(0)
    run, net = shoal.init(strategy, announce=lambda _: None), model()
    net, optimizer, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    said: list[str] = []
    if fault and run.rank == 0:
        threading.Thread(target=strike, args=(run, fault, Random(seed), said), daemon=True).start()
    gap = Gap()
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(100 * step + run.rank)
        x, y = torch.randn(8, 20, generator=draws, dtype=torch.float64), torch.randint(4, (8,), generator=draws)
        optimizer.zero_grad()
        run.forward_backward(F.cross_entropy, net, x, y)
        optimizer.step()
        run.wait()
        gap.tick()
        time.sleep(0.01)
    return run.weights(), gap.longest_s, said


def strike(run: shoal.Run, fault: str, chance: Random, said: list[str]) -> None:
    """Send a signal to someone at some time: `SIGKILL primary`."""
    part: Any = run._part
    fleet = part.remote.fleet
    name, role = fault.split()
    time.sleep(chance.random() * STEPS * 0.01)
    view = None
    while view is None or not view.backups:  # a replica must be there to survive the loss of one
        view = fleet.views.newest(chance.randrange(fleet.job.shards), 5, lambda view: bool(view.backups))
    server = {"primary": view.primary, "backup": view.backups[0]}.get(role)
    pid = fleet.judge.pid if role == "arbiter" else fleet.pid_of(server)
    os.kill(pid, getattr(signal, name))
    said.append(f"{fault} {server}: pid {pid}")
    if name == "SIGSTOP":
        time.sleep(1.5 + chance.random())
        os.kill(pid, signal.SIGCONT)  # it wakes up when another has taken its place, or not yet


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return world.run(2, trained, "server=2,part_mb=0.01")[0][0]


FAULTS = [
    "SIGKILL primary",
    "SIGKILL backup",
    "SIGKILL arbiter",
    "SIGSTOP primary",
    "SIGSTOP backup",
    "SIGSTOP arbiter",
]


@pytest.mark.parametrize("seed", range(TRIALS))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_loses_one_process_ends_at_the_bits_of_one_that_does_not(
    fault: str, seed: int, undisturbed: dict[str, Tensor]
) -> None:
    found = world.run(2, trained, "server=2,replicas=2,part_mb=0.01,lease_s=1", fault, seed)
    assert found[0][2], "nothing happened"
    for weights, _, _ in found:
        for name, value in undisturbed.items():
            assert torch.equal(weights[name], value), (name, found[0][2])


@pytest.mark.parametrize("staleness", ["2", "async"])
def test_stale_workers_go_on_as_well(staleness: str) -> None:
    found = world.run(
        3, trained, f"server=2,replicas=2,part_mb=0.01,lease_s=1,staleness={staleness}", "SIGKILL primary"
    )
    for weights, _, _ in found[1:]:
        assert all(torch.equal(weights[name], value) for name, value in found[0][0].items())


def loses_all(_: str) -> None:
    torch.manual_seed(0)
    run, net = shoal.init("server=1,lease_s=0.5", announce=lambda _: None), model()
    net, optimizer, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
    part: Any = run._part
    for step in range(1000):
        if step == 3 and run.rank == 0:
            fleet = part.remote.fleet
            os.kill(next(iter(fleet.servers)), signal.SIGKILL)
        run.forward_backward(F.cross_entropy, net, torch.ones(2, 20).double(), torch.tensor([1, 2]))
        optimizer.step()


def test_the_loss_of_all_replicas_ends_the_run_and_says_what_to_do() -> None:
    with pytest.raises(LaunchError, match=r"shard 0 of the parameter servers is lost.*last checkpoint") as error:
        world.run(2, loses_all, "")
    assert "replicas=2" in str(error.value)
