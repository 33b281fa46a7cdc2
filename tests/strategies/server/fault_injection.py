"""A short training of two or three workers with servers, for the tests of faults."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faulty_network import Trouble, wake
from torch import Tensor, nn

import shoal
from shoal.run.supervised import supervised

STEPS = 40
TRIALS = int(os.environ.get("SHOAL_FAULT_TRIALS", "20"))
"""Trials of each fault; `make test-faults` makes 300."""
QUICK = 1
"""Trials of each fault in `make test`."""


def trials(quick: int = QUICK) -> list[Any]:
    """Return seeds. The first few are quick enough for `make test`."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed >= quick else [])
        for seed in range(TRIALS)
    ]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    ).double()


def trained(
    strategy: str, trouble: Trouble | None = None, wakes_s: float | None = None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return weights after steps with one fault, and the statistics of the servers."""
    torch.manual_seed(0)
    run, net = shoal.init(strategy, announce=lambda _: None), model()
    if trouble is not None and run.rank == 0:
        trouble.install()
        if wakes_s is not None:
            threading.Thread(target=wake, args=(trouble, wakes_s), daemon=True).start()
    if trouble is not None and run.rank == 1:
        (trouble.folder / "worker.pid").write_text(str(os.getpid()))
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    steps(run, net, optimizer)
    part: Any = run._local_model()
    return run.weights(), part.remote_optimizer.client.stats()


def steps(run: shoal.Run, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take all steps of this worker, on data that depends on its rank only."""
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(100 * step + run.rank)
        x, y = (
            torch.randn(8, 20, generator=draws, dtype=torch.float64),
            torch.randint(4, (8,), generator=draws),
        )
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, net), x, y)
        optimizer.step()


def check(
    found: list[tuple[dict[str, Tensor], list[dict[str, Any]]]], undisturbed: dict[str, Tensor]
) -> None:
    """Assert that all workers have the same bits, and every partition took every step once."""
    for weights, figures in found:
        assert [figure["clock"] for figure in figures] == [STEPS, STEPS]
        for name, value in undisturbed.items():
            assert torch.equal(weights[name], value), name
