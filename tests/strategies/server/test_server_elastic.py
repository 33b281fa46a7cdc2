"""Shards are added and removed during training: real processes, some of which are killed."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fault_injection import model, trials
from torch import Tensor

import shoal
from shoal.errors import UsageError
from shoal.parameter_server.coordinator.admin_client import AdminClient, send_command, table
from shoal.run.supervised import supervised
from shoal.testing import world

STEPS = 80


Happening = Callable[[Path, Any, Random], list[Any]]


def trained(
    strategy: str, directory: Path, happening: Happening | None = None, seed: int = 0
) -> Any:
    """Return weights after steps during which an action runs, and the result of the action."""
    torch.manual_seed(0)
    run, net = shoal.init(strategy, announce=lambda _: None), model()
    net, optimizer = run.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    )
    said: list[Any] = []
    beside = threading.Thread(
        target=happen, args=(run, directory, happening, Random(seed), said), daemon=True
    )
    beside.start()
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(100 * step + run.rank)
        x, y = (
            torch.randn(8, 20, generator=draws, dtype=torch.float64),
            torch.randint(4, (8,), generator=draws),
        )
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, net), x, y)
        if run.is_synchronous:
            run.clip_gradients(1.0)
        optimizer.step()
        time.sleep(0.01)
    beside.join()
    return run.weights(), said


def happen(
    run: Any, directory: Path, happening: Happening | None, chance: Random, said: list[Any]
) -> None:
    if happening is None or run.rank > 0:
        return
    run.remote.publish_address(directory)
    time.sleep(chance.random() * 0.2)
    try:
        said += happening(directory, run._local_model().remote_optimizer.launcher.pool, chance)
    except Exception as error:  # noqa: BLE001 - it is the test that is to hear of it
        said.append(error)


def grow_and_shrink(directory: Path, _fleet: Any, _chance: Random) -> list[Any]:
    with closing(AdminClient(directory)) as control:
        first, second = control.add(), control.add()
        grown = control.servers()
        control.remove(1)
        control.remove(first)
        return [(first, second), grown, control.servers()]


def grow(directory: Path, _fleet: Any, _chance: Random) -> list[Any]:
    return [table(send_command(directory, "add", []))]


def add_and_kill(directory: Path, fleet: Any, chance: Random) -> list[Any]:
    """Kill a primary, a backup or the coordinator while partitions go to a new shard."""
    with closing(AdminClient(directory)) as control:
        beside = threading.Thread(target=send_command, args=(directory, "add", []), daemon=True)
        beside.start()
        time.sleep(chance.random() * 0.5)
        victim = chance.choice([*(s for s in control.servers() if s["role"] != "joining"), None])
    os.kill(fleet.coordinator.pid if victim is None else victim["pid"], signal.SIGKILL)
    time.sleep(2.0)
    return [victim]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return world.run(2, trained, "server=2,part_mb=0.01", tmp_path_factory.mktemp("run"))[0][0]


def test_shards_come_and_go_and_the_bits_stay(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    found = world.run(2, trained, "server=2,part_mb=0.01", tmp_path, grow_and_shrink)
    said = found[0][1]
    assert not isinstance(said[0], Exception), said
    numbers, grown, shrunk = said
    assert numbers == (2, 3)
    assert [(s["shard"], s["role"]) for s in grown] == [(n, "primary") for n in range(4)]
    assert all(s["partitions"] > 0 for s in grown if s["clock"] > 0)
    assert [s["shard"] for s in shrunk] == [0, 3]
    for weights, _ in found:
        assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())


@pytest.mark.slow
def test_a_shard_for_which_there_is_no_part_holds_none_and_disturbs_nobody(tmp_path: Path) -> None:
    alone = world.run(2, trained, "server=1", tmp_path)[0][0]
    found = world.run(2, trained, "server=1", tmp_path, grow)
    first, second = found[0][1][0].splitlines()[1:]
    assert first.split()[:2] == ["0", "primary"]
    assert "no part" not in first
    assert second.split()[:2] == ["1", "primary"]
    assert second.endswith("no partition is left for it: a smaller part_mb cuts more")
    for weights, _ in found:
        assert all(torch.equal(weights[name], value) for name, value in alone.items())


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["1", "async"])
def test_workers_at_different_steps_are_not_disturbed_either(
    tmp_path: Path, staleness: str
) -> None:
    found = world.run(
        3, trained, f"server=2,part_mb=0.01,staleness={staleness}", tmp_path, grow_and_shrink
    )
    assert not isinstance(found[0][1][0], Exception), found[0][1]
    for weights, _ in found[1:]:
        assert all(torch.equal(weights[name], value) for name, value in found[0][0].items())


@pytest.mark.parametrize("seed", trials())
def test_nothing_is_lost_when_someone_dies_while_parts_move(
    tmp_path: Path, seed: int, undisturbed: dict[str, Tensor]
) -> None:
    found = world.run(
        2, trained, "server=2,replicas=2,part_mb=0.01,lease_s=1", tmp_path, add_and_kill, seed
    )
    said = found[0][1]
    assert not isinstance(said[0], Exception), said
    for weights, _ in found:
        assert all(torch.equal(weights[name], value) for name, value in undisturbed.items()), said


def add_and_kill_it(directory: Path, _fleet: Any, _chance: Random) -> list[Any]:
    """Kill the primary of a new shard as soon as it has partitions."""
    with closing(AdminClient(directory)) as control:
        beside = threading.Thread(target=send_command, args=(directory, "add", []), daemon=True)
        beside.start()
        while not (
            found := [
                s
                for s in control.servers()
                if s["shard"] == 2 and s["partitions"] and s["role"] == "primary"
            ]
        ):
            time.sleep(0.002)
    os.kill(found[0]["pid"], signal.SIGKILL)
    return found


@pytest.mark.slow
def test_a_new_shard_may_lose_a_server_as_soon_as_it_has_parts(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    found = world.run(
        2, trained, "server=2,replicas=2,part_mb=0.01,lease_s=1", tmp_path, add_and_kill_it
    )
    assert not isinstance(found[0][1][0], Exception), found[0][1]
    for weights, _ in found:
        assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())


def says_no(directory: Path, _fleet: Any, _chance: Random) -> list[Any]:
    found: list[Any] = []
    for shard in (0, 7):
        with pytest.raises(UsageError) as error:
            send_command(directory, "remove", [shard])
        found.append(str(error.value))
    return found


def test_what_cannot_be_done_is_said_and_training_goes_on(tmp_path: Path) -> None:
    found = world.run(2, trained, "server=2,part_mb=0.01", tmp_path, says_no)
    assert found[0][1] == [
        "shard 0 stays: workers agree there when to stop. Remove another one.",
        "there is no shard 7; there are 0, 1.",
    ]


def test_a_directory_without_servers_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no servers run for it here.*run of `shoal train`"):
        AdminClient(tmp_path)
