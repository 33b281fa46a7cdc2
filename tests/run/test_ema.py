"""The moving average of weights: its formula, under every strategy, and through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.run import Run
from shoal.run.ema import Ema
from shoal.testing import world
from tests.harness.in_turn import in_turn

STEPS, DECAY = 8, 0.5
LINES = [
    (3, ["ddp", "zero3"]),
    (2, ["server=1"]),
    pytest.param(2, ["tensor=2", "pipeline=2", "zero1", "zero2"], marks=pytest.mark.slow),
    pytest.param(4, ["zero3,hybrid=2"], marks=pytest.mark.slow),
]


def linear_run(value: float) -> tuple[Run, nn.Linear]:
    """Return a run of one process with one weight."""
    run, model = shoal.init(announce=str), nn.Linear(1, 1)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, 0.0)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model


def test_the_average_follows_its_formula_with_a_shorter_memory_at_first() -> None:
    (run, model), expected = linear_run(1.0), 1.0
    ema = run.ema(0.5)
    for step, weight in enumerate([2.0, 3.0, 5.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0], start=1):
        nn.init.constant_(model.weight, weight)
        ema.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
    assert ema.state()["ema.weight"].item() == pytest.approx(expected, rel=1e-6)


def test_weights_come_back_after_an_evaluation_even_if_it_fails() -> None:
    run, model = linear_run(1.0)
    ema = run.ema(0.5)
    nn.init.constant_(model.weight, 9.0)

    def fail() -> None:
        with ema.in_place():
            assert model.weight.item() == 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model.weight.item() == 9.0


@pytest.mark.parametrize("decay", [0.0, 1, "0.9"])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(UsageError, match="the decay is a number between 0 and 1"):
        linear_run(1.0)[0].ema(decay)


def test_a_run_has_one_average() -> None:
    run, _ = linear_run(1.0)
    run.ema(0.9)
    with pytest.raises(UsageError, match="has a moving average already"):
        run.ema(0.9)


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12, shuffle=True)


def begun(line: str) -> tuple[Run, nn.Module, torch.optim.Optimizer, DataLoader, Ema]:
    run = shoal.init(line, announce=str)
    torch.manual_seed(1)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, data())
    return run, model, optimizer, loader, run.ema(DECAY)


def steps(
    parts: tuple[Run, nn.Module, torch.optim.Optimizer, DataLoader, Ema], count: int
) -> dict[str, Tensor]:
    """Take steps. Return weights, averages, and what each predicts."""
    run, model, optimizer, loader, ema = parts
    taken = 0
    while taken < count:
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(lambda x, y: (model(x) - y).square().mean(), x, y)
            optimizer.step()
            ema.update()
            taken += 1
            if taken == count:
                break
    found = dict(run.weights())
    predicted = run.predict(lambda x, y: model(x), data())
    with ema.in_place():
        found |= {f"average {name}": value for name, value in run.weights().items()}
        found["predicted by the average"] = run.predict(lambda x, y: model(x), data())
    assert torch.equal(run.predict(lambda x, y: model(x), data()), predicted)
    return found | {"predicted": predicted}


def trains(line: str) -> dict[str, Tensor]:
    return steps(begun(line), STEPS)


def saves(line: str, directory: Path) -> None:
    parts = begun(line)
    steps(parts, STEPS // 2)
    parts[0].checkpoint(directory).save(STEPS // 2)


def resumes(line: str, directory: Path) -> dict[str, Tensor]:
    parts = begun(line)
    assert parts[0].checkpoint(directory).resume() == STEPS // 2
    return steps(parts, STEPS // 2)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("ranks", "lines"), LINES)
def test_the_average_under_a_strategy_is_that_of_one_device(ranks: int, lines: list[str]) -> None:
    expected = trains("single")
    assert not torch.allclose(expected["predicted"], expected["predicted by the average"])
    for results in world.run(ranks, in_turn, trains, *zip(lines, strict=True)):
        for found in results:
            assert_same(found, expected)


def thaws(line: str) -> dict[str, Tensor]:
    """Train the last layers, then all of them by a new optimizer; the average goes on."""
    run = shoal.init(line, announce=str)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    first = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, first, loader = run.prepare(model, first, data())
    parts = run, model, first, loader, run.ema(DECAY)
    steps(parts, 3)
    model[0].requires_grad_(True)
    second = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    return steps((run, model, second, *parts[3:]), 3)


def test_the_average_goes_on_where_layers_are_thawed() -> None:
    expected = thaws("single")
    assert not torch.equal(expected["0.weight"], expected["average 0.weight"])
    for found in world.run(2, thaws, "ddp"):
        assert_same(found, expected)


def test_models_that_get_other_names_are_refused_by_the_average() -> None:
    run, _ = linear_run(1.0)
    run.ema(0.9)
    other = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"Prepare all models first, and call run\.ema after that"):
        run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(("zero3", 2), ("ddp", 3)), (("ddp", 2), ("tensor=2", 2))]
)
def test_a_checkpoint_has_the_average_for_any_strategy(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    world.run(before[1], saves, before[0], tmp_path)
    expected = trains("single")
    for found in world.run(after[1], resumes, after[0], tmp_path):
        assert_same(found, expected)


def saves_without(directory: Path) -> None:
    run, *_ = linear_run(3.0)
    run.checkpoint(directory).save(1)


def test_a_checkpoint_without_an_average_begins_one_with_its_weights(tmp_path: Path) -> None:
    saves_without(tmp_path)
    run, model = linear_run(1.0)
    ema, notes = run.ema(0.9), []
    run._prepared.announce = notes.append
    run.checkpoint(tmp_path).resume()
    assert ema.state()["ema.weight"].item() == model.weight.item() == 3.0
    assert any("it holds no moving average" in note for note in notes)
