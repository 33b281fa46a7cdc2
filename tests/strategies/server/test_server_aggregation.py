"""With several workers on each of several machines, an aggregator sums for each machine."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world

WIDTH = 64


def agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def data() -> list[tuple[Tensor, int]]:
    draws = torch.Generator().manual_seed(3)
    return [
        (torch.randn(20, generator=draws, dtype=torch.float64), index % 4) for index in range(46)
    ]


def on_machines_of_two(strategy: str, clip: float | None = None) -> Any:
    """Return weights after two epochs, bytes of the servers, and processes of this rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 2:
        os.environ |= {
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": str(min(2, ranks - rank // 2 * 2)),
        }
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Sequential(
        nn.Linear(20, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
    )
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    batches = DataLoader(data(), batch_size=10)  # type: ignore[arg-type]
    model, optimizer, loader = run.prepare(model, optimizer, batches)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(supervised(F.cross_entropy, model), x, y)
            if clip is not None:
                run.clip_gradients(clip)
            optimizer.step()
    part: Any = run._local_model()
    remote = part.remote_optimizer
    figures = (
        [] if remote is None else [b for f in remote.client.stats() for b in f.get("behind", [f])]
    )
    moved = sum(f["received_bytes"] for f in figures), sum(f["sent_bytes"] for f in figures)
    return (
        run.weights(),
        moved,
        [] if remote is None else [len(fleet.servers) for fleet in remote.launcher.pools],
    )


def test_aggregation_is_exact_and_halves_the_bytes_between_machines() -> None:
    expected = world.run(1, on_machines_of_two, "single")[0][0]
    relayed = world.run(4, on_machines_of_two, "server=2,part_mb=0.04,shared_memory=false")
    alone = world.run(
        4, on_machines_of_two, "server=2,part_mb=0.01,shared_memory=false,aggregate=false"
    )
    for weights, *_ in [*relayed, *alone]:
        agree(weights, expected)
    assert [len(fleets) for *_, fleets in relayed] == [2, 0, 2, 0]
    assert [len(fleets) for *_, fleets in alone] == [1, 0, 1, 0]
    for whole, half in zip(alone[0][1], relayed[0][1], strict=True):
        assert 0.4 < half / whole < 0.6  # of two workers on a machine, one push


def test_a_worker_that_is_alone_on_its_machine_is_summed_too() -> None:
    """Its aggregator sums nothing. Servers of its machine read its gradient all the same."""
    expected = world.run(1, on_machines_of_two, "single")[0][0]
    for weights, *_ in world.run(3, on_machines_of_two, "server=2,part_mb=0.01"):
        agree(weights, expected)


def test_the_norm_is_that_of_all_machines() -> None:
    expected = world.run(1, on_machines_of_two, "single", 0.05)[0][0]
    for weights, *_ in world.run(4, on_machines_of_two, "server=2,part_mb=0.01", 0.05):
        agree(weights, expected)


def test_two_runs_through_relays_give_the_same_bits() -> None:
    first, second = (
        world.run(4, on_machines_of_two, "server=2,part_mb=0.01")[0][0] for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
