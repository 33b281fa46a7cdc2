"""Servers that are killed or stopped in every phase of a step: real processes and signals, seeded; nothing is lost."""

import os
import signal
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from between import PHASES, Trouble, wake
from torch import Tensor, nn

import shoal
from shoal.errors import LaunchError
from shoal.testing import world

STEPS = 40
TRIALS = int(os.environ.get("SHOAL_FAULT_TRIALS", "20"))
"""Of each fault; `make test-faults` sets it to 300."""
QUICK = 2
"""As many of them are in `make test`."""


def trials() -> list[Any]:
    """Seeds; the first few are quick enough for every day."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= QUICK else []) for seed in range(TRIALS)]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def trained(
    strategy: str, trouble: Trouble | None = None, wakes_s: float | None = None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Weights after some steps with one trouble on the way, and what the servers have seen."""
    torch.manual_seed(0)
    run, net = shoal.init(strategy, announce=lambda _: None), model()
    if trouble is not None and run.rank == 0:
        trouble.install()
        if wakes_s is not None:
            threading.Thread(target=wake, args=(trouble, wakes_s), daemon=True).start()
    net, optimizer, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(100 * step + run.rank)
        x, y = torch.randn(8, 20, generator=draws, dtype=torch.float64), torch.randint(4, (8,), generator=draws)
        optimizer.zero_grad()
        run.forward_backward(F.cross_entropy, net, x, y)
        optimizer.step()
    part: Any = run._part
    return run.weights(), part.remote.client.figures()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return world.run(2, trained, "server=2,part_mb=0.01")[0][0]


def check(found: list[tuple[dict[str, Tensor], list[dict[str, Any]]]], undisturbed: dict[str, Tensor]) -> None:
    """Every worker ends at the same bits, and every part has taken every step once."""
    for weights, figures in found:
        assert [figure["clock"] for figure in figures] == [STEPS, STEPS]
        for name, value in undisturbed.items():
            assert torch.equal(weights[name], value), name


SIGNALS = [
    "SIGKILL primary", "SIGKILL backup", "SIGKILL arbiter", "SIGSTOP primary", "SIGSTOP backup", "SIGSTOP arbiter",
]  # fmt: skip


@pytest.mark.parametrize("seed", trials())
@pytest.mark.parametrize("fault", SIGNALS)
def test_a_run_that_loses_one_process_ends_at_the_bits_of_one_that_does_not(
    fault: str, seed: int, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    chance = Random(f"{fault} {seed}")
    phase = list(PHASES)[(seed + SIGNALS.index(fault)) % len(PHASES)]
    shared = chance.random() < 0.5
    trouble = Trouble(tmp_path, fault, PHASES[phase], chance.randint(1, 30))
    # It goes on before another has taken its place, or after that, or never.
    wakes_s = chance.choice([0.3, 2.0, None])
    strategy = f"server=2,replicas=2,part_mb=0.01,lease_s=1,shared_memory={str(shared).lower()}"
    found = world.run(2, trained, strategy, trouble, wakes_s, timeout_s=30)
    assert trouble.mark.exists(), f"nothing happened in {phase}"
    check(found, undisturbed)


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
