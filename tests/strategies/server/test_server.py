"""Parameter servers beyond the conformance table: optimizers, clipping, staleness, memory,
saving, refusals.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import ConfigError, StrategyRefused, UsageError
from shoal.run.supervised import supervised
from shoal.strategies import build_strategies, parse_line
from shoal.strategies.server import strategy as strategy_of_servers
from shoal.testing import world
from tests.harness.in_turn import in_turn
from tests.matrix.cases import images

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
}


class Scaled(nn.Module):
    """Layers for two parameter groups, a scalar, a frozen one, and a channels-last one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3).to(memory_format=torch.channels_last)
        self.layers = nn.Sequential(nn.Linear(216, 12), nn.Tanh(), nn.Linear(12, 10))
        self.scale, self.shift = (
            nn.Parameter(torch.tensor(1.5)),
            nn.Parameter(torch.tensor(0.5), requires_grad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.conv(x).flatten(1)) * self.scale + self.shift
        return scores


def trained(
    strategy: str, optimizer_name: str = "SGD", max_norm: float | None = None
) -> dict[str, Tensor]:
    """Return the model's weights and the optimizer's state after an epoch with a schedule."""
    torch.manual_seed(0)
    run, model = shoal.init(strategy, announce=lambda _: None), Scaled().double()
    groups = [
        {"params": list(model.layers.parameters())},
        {"params": [*model.conv.parameters(), model.scale]},
    ]
    optimizer = OPTIMIZERS[optimizer_name](groups)
    optimizer.param_groups[1]["lr"] /= 2
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        if max_norm is not None:
            run.clip_gradients(max_norm)
        optimizer.step()
        schedule.step()
    tensors, _, _ = run.state()
    return {name: value.clone() for name, value in tensors.items()}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max().clamp(
            min=1e-12
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_servers_step_as_the_optimizer_itself_does_and_give_back_its_state(name: str) -> None:
    expected = trained("single", name)
    for found in world.run(2, trained, "server=2,part_mb=0.001", name):
        agree(found, expected)


def moves_a_parameter(strategy: str) -> str:
    """Return the error of a step after a parameter has come to another group."""
    run, model = shoal.init(strategy, announce=lambda _: None), Scaled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.01})
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_parameter_that_comes_to_another_group_is_refused() -> None:
    for text in world.run(2, moves_a_parameter, "server=1"):
        assert text.startswith("the optimizer's groups have other parameters than in run.prepare")


def test_clipping_sees_the_norm_over_all_servers() -> None:
    expected = trained("single", "SGD", 0.05)
    for found in world.run(3, trained, "server=2,part_mb=0.001", "SGD", 0.05):
        agree(found, expected)


@pytest.mark.slow
def test_two_runs_of_three_workers_give_the_same_bits() -> None:
    first, second = (world.run(3, trained, "server=2,part_mb=0.001") for _ in range(2))
    for name, value in first[0].items():
        assert torch.equal(value, second[0][name]), name


def apart(strategy: str) -> tuple[dict[str, Tensor], float, bool]:
    """Train asynchronously, then synchronize.

    Return weights, the last loss, and if weights were different.
    """
    torch.manual_seed(0)
    run, model = shoal.init(strategy, announce=lambda _: None), Scaled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.forward_backward(supervised(F.cross_entropy, model), x, y)
            optimizer.step()
    were_apart = run.synchronize()
    assert not run.synchronize()
    return run.weights(), loss.item(), were_apart


@pytest.mark.slow
def test_stale_workers_learn_and_end_at_the_same_weights() -> None:
    found = world.run(3, apart, "server=2,staleness=async,part_mb=0.001")
    (weights, _, were_apart), *others = found
    assert were_apart
    for other, _, _ in others:
        assert all(torch.equal(other[name], value) for name, value in weights.items())
    exact, _, _ = apart("single")
    moved = sum(float((exact[n] - v).square().sum()) for n, v in initial().items()) ** 0.5
    away = sum(float((exact[n] - v).square().sum()) for n, v in weights.items()) ** 0.5
    assert away < 0.5 * moved  # most of the way is the way of synchronous steps


def initial() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(Scaled().double().state_dict())


def test_a_long_lease_holds_up_neither_the_start_nor_the_end() -> None:
    # Neither an eighth of it passes, after which servers beat again, nor a twentieth, after which
    # the coordinator looks.
    world.run(2, trained, "server=2,part_mb=0.001,lease_s=4000", timeout_s=25)


def refused(kind: str, precision: str = "fp32") -> str:
    with pytest.raises((StrategyRefused, ConfigError)) as error:
        prepare(kind, precision)
    return str(error.value)


def prepare(kind: str, precision: str) -> None:
    precision_name: Any = precision
    run = shoal.init("server=2", precision=precision_name, announce=lambda _: None)
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(kind != "frozen")
    if kind == "no package":  # as if the ranks were on two machines
        strategy_of_servers.spans_machines = lambda _: True
        strategy_of_servers.can_encrypt = lambda: False
    maker = torch.optim.Adafactor if kind == "adafactor" else torch.optim.SGD
    run.prepare(model, maker(model.parameters(), lr=0.1))


def test_what_servers_cannot_do_is_said_before_the_run() -> None:
    calls = ("adafactor",), ("sgd", "fp16"), ("frozen",), ("no package",)
    for optimizer, scaled, frozen, package in world.run(2, in_turn, refused, *calls):
        assert "Adafactor cannot run on parameter servers" in optimizer
        assert "Use bf16" in scaled
        assert "no trainable parameter" in frozen
        assert 'pip install "shoal[tls]", on every host' in package


def children() -> set[int]:
    """Return the pids of live processes of this one's session."""
    session, found = os.getsid(0), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.add(int(entry.name))
    return found


def with_servers(log: Path) -> None:
    trained("server=3")
    (log / str(os.getpid())).write_text(" ".join(map(str, children())))


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_servers_end_with_the_run(tmp_path: Path) -> None:
    world.run(2, with_servers, tmp_path)
    pids = {int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()}
    assert (
        len(pids) >= 5
    )  # the rank that has the nursery, the nursery, three servers; and the other rank
    deadline = time.monotonic() + 10
    while [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def test_compressed_gradients_keep_workers_equal_and_are_not_exact() -> None:
    strategy = "server=2,compress=topk=0.2,part_mb=0.001"
    first, second = world.run(2, trained, strategy)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    exact = trained("single")
    assert not all(torch.equal(first[name], exact[name]) for name in exact)
    (made,) = build_strategies(parse_line(strategy))
    expected = ["compress=topk=0.2: gradients arrive rounded, or late."]
    assert made.deviations == expected  # type: ignore[attr-defined]


def on_a_machine_of_its_own(strategy: str) -> tuple[dict[str, Tensor], int, bool]:
    """Train as `trained`, with each rank as if it were alone on its machine.

    Return weights, the number of servers there, and if the coordinator is there.
    """
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.manual_seed(0)
    run, model = shoal.init(strategy, announce=lambda _: None), Scaled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    assert run._local_model() is not None
    engine: Any = run._local_model().remote_optimizer
    return (
        run.weights(),
        len(engine.launcher.pool.servers),
        engine.launcher.pool.coordinator is not None,
    )


def test_each_machine_starts_its_share_of_the_servers() -> None:
    expected = world.run(1, on_a_machine_of_its_own, "server=1")[0][0]
    found = world.run(2, on_a_machine_of_its_own, "server=3,replicas=2,part_mb=0.001")
    assert [(servers, judges) for _, servers, judges in found] == [(3, True), (3, False)]
    for weights, _, _ in found:
        agree(weights, expected)


def goes_on_at_once() -> list[Tensor]:
    """Save on all ranks. Rank 0 takes its next step while the others still read the state."""
    run = shoal.init("server=2,staleness=async,part_mb=0.0005", announce=lambda _: None)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if run.rank:
        engine: Any = run._local_model().remote_optimizer
        state, pull = engine.client.state, engine.client.pull
        engine.client.state = lambda part: time.sleep(0.05) or state(part)
        engine.client.pull = lambda: time.sleep(0.2) or pull()

    def step() -> None:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.mse_loss, model), torch.ones(2, 16), torch.zeros(2, 16))
        optimizer.step()

    step()
    tensors, _, _ = run.state()
    found = [tensors[name].clone() for name in sorted(tensors)]
    step()
    weights = run.weights()
    found += [weights[name].clone() for name in sorted(weights)]
    step()
    run.synchronize()
    return found


def test_all_workers_save_the_same_state_when_one_continues_at_once() -> None:
    first, *others = world.run(3, goes_on_at_once)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
