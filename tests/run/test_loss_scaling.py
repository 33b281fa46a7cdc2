"""fp16: a step with an overflow anywhere in it is skipped as a whole, on every rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world
from tests.harness.in_turn import in_turn

SCALE = 65536.0
"""Of the first step; an overflow halves it."""


def mean_of_floats(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def calls(strategy: str, plan: list[str]) -> tuple[list[bool], float]:
    """Return which of the steps in `plan` moved the weights, and the last scale; "overflow" is a
    call that overflows on the last rank.
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
        elif word == "clip":
            run.clip_gradients(1.0)
        elif word == "step":
            optimizer.step()
            moved.append(not torch.equal(run.weights()["weight"], before))
        else:
            optimizer.zero_grad(set_to_none=word == "drop")
    return moved, run.state()[1]["loss_scale"]["scale"]


@pytest.mark.parametrize(
    "cases",
    [
        [
            ("ddp", ["overflow", "clip"]),
            ("zero3", ["good", "overflow"]),
            ("ddp", ["good", "overflow", "good"]),
        ],
        pytest.param(
            [("zero1", ["good", "overflow", "good"]), ("zero2", ["overflow"])],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_overflow_on_one_rank_skips_its_step_on_all_and_halves_the_scale(
    cases: list[tuple[str, list[str]]],
) -> None:
    rest = ["step", "drop", "good", "good", "step"]
    plans = [(strategy, [*where, *rest]) for strategy, where in cases]
    expected = [([False, True], SCALE / 2)] * len(cases)
    assert world.run(2, in_turn, calls, *plans) == [expected] * 2


def test_gradients_that_were_dropped_take_their_overflow_along() -> None:
    plans = [("ddp", ["overflow", word, "good", "step"]) for word in ("drop", "zero")]
    for results in world.run(2, in_turn, calls, *plans):
        assert [moved for moved, _ in results] == [[True], [True]]
