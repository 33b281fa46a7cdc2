"""fp16: a step with an overflow anywhere in it is skipped as a whole, on every rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world


def mean_of_floats(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def calls(strategy: str, plan: list[str]) -> list[bool]:
    """Which of the steps in `plan` moved the weights; "overflow" is a call that overflows on
    the last rank.
    """
    run, model = shoal.init(strategy, precision="fp16", announce=lambda _: None), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    dataset = TensorDataset(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
    (x, y), moved = next(iter(loader)), []
    for word in plan:
        before = run.weights()["weight"].clone()
        if word in ("good", "overflow"):
            factor = 1e30 if word == "overflow" and run.rank == run.world_size - 1 else 1.0
            run.forward_backward(supervised(mean_of_floats, model), x * factor, y)
        elif word == "step":
            optimizer.step()
            moved.append(not torch.equal(run.weights()["weight"], before))
        else:
            optimizer.zero_grad(set_to_none=word == "drop")
    return moved


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("ddp", ["overflow", "good"]),
        ("zero3", ["good", "overflow"]),
        ("ddp", ["good", "overflow", "good"]),
        pytest.param("zero1", ["good", "overflow", "good"], marks=pytest.mark.slow),
    ],
)
def test_an_overflow_in_any_call_before_a_step_skips_only_that_step(
    strategy: str, where: list[str]
) -> None:
    plan = [*where, "step", "drop", "good", "good", "step"]
    assert world.run(2, calls, strategy, plan) == [[False, True]] * 2


@pytest.mark.parametrize("word", ["drop", "zero"])
def test_gradients_that_were_dropped_take_their_overflow_along(word: str) -> None:
    assert world.run(2, calls, "ddp", ["overflow", word, "good", "step"]) == [[True]] * 2


def test_clipping_between_an_overflow_and_the_step_does_not_bring_it_back() -> None:
    run, model = shoal.init(precision="fp16", announce=lambda _: None), nn.Linear(4, 3)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    run.forward_backward(
        supervised(mean_of_floats, model),
        torch.full((2, 4), 1e30),
        torch.zeros(2, dtype=torch.int64),
    )
    run.clip_gradients(1.0)
    optimizer.step()
    assert torch.equal(model.weight, before)


def fp16_overflow(strategy: str) -> tuple[list[float], bool]:
    run = shoal.init(strategy, precision="fp16", announce=lambda _: None)
    model = nn.Linear(4, 3)
    dataset = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=4)
    )
    before, scales, moved = run.weights()["weight"].clone(), [], False
    for step, (x, y) in enumerate(loader):
        x = x * (1e30 if step == 0 and run.rank == 1 else 1)
        run.forward_backward(
            supervised(lambda out, y: F.cross_entropy(out.float(), y), model), x, y
        )
        optimizer.step()
        scales.append(run.state()[1]["loss_scale"]["scale"])
        moved = moved or (step == 0 and not torch.equal(run.weights()["weight"], before))
    return scales, moved


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.slow), "zero3"]
)
def test_an_overflow_on_one_rank_skips_all_steps_and_halves_the_scale(strategy: str) -> None:
    assert world.run(2, fp16_overflow, strategy) == [([32768.0, 32768.0], False)] * 2
