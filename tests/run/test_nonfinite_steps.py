"""NaN and infinity in a loss or a gradient: known on all ranks in the same step, and skipped."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import ConfigError, TrainingDiverged
from shoal.testing import world
from tests.harness.in_turn import in_turn

STEPS = 6
SLOW = pytest.mark.slow


class Spoils(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Net(nn.Module):
    """A regression in two layers, whose gradients can be spoiled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return Spoils.apply(self.second(self.first(x).tanh()), self.factor)


def trains(
    strategy: str,
    plants: dict[int, tuple[int, str, float]],
    options: dict[str, Any] | None = None,
    with_closure: bool = False,
) -> dict[str, Any]:
    """Train six steps. A plant spoils the loss or a gradient of one rank in one step."""
    notes = list[str]()
    run = shoal.init(strategy, announce=notes.append, **(options or {}))
    model = Net(6).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(8 * STEPS, 4, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(data), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    plant: list[tuple[int, str, float]] = []

    def compute_loss(x: Tensor) -> Tensor:
        rank, kind, factor = plant[0] if plant else (-1, "", 1.0)
        spoiled = rank in (run.rank, run.world_size)
        model.factor = factor if spoiled and kind == "gradient" else 1.0
        return F.mse_loss(model(x), x) * (factor if spoiled and kind == "loss" else 1.0)

    finite, moved = [], []
    for step, (x,) in enumerate(loader):
        plant[:] = [plants[step]] if step in plants else []
        before = {name: value.clone() for name, value in run.weights().items()}

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            finite.append(run.finite)
            return loss

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        after = run.weights()
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
    weights = run.weights()
    whole = all(bool(value.isfinite().all()) for value in weights.values())
    return {"finite": finite, "moved": moved, "whole": whole, "notes": notes, "weights": weights}


def told(results: Sequence[dict[str, Any]]) -> list[str]:
    return [note for result in results for note in result["notes"] if "is not finite: " in note]


def assert_skipped(results: Sequence[dict[str, Any]], plants: dict[int, Any]) -> None:
    """Every plant was known on all ranks in its step, skipped there, and told."""
    expected = [step not in plants for step in range(STEPS)]
    for result in results:
        assert result["finite"] == expected
        assert result["moved"] == expected
        assert result["whole"]
    notes = told(results)
    assert [note.split()[2] for note in notes] == [str(step + 1) for step in sorted(plants)]


PLANTS = {1: (1, "gradient", math.nan), 2: (0, "loss", math.inf), 4: (1, "loss", math.nan)}


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    calls = [(strategy, PLANTS) for strategy in ("ddp", "zero3", "server=1")]
    for results in zip(*world.run(2, in_turn, trains, *calls), strict=True):
        assert_skipped(results, PLANTS)
        gradient, first, last = told(results)
        assert "the gradient of " in gradient
        assert "first.weight" in gradient
        assert "on rank 1" in gradient
        assert "loss of rank 0 is inf" in first
        assert "loss of rank 1 is nan" in last


@pytest.mark.parametrize("strategy", ["pipeline=2", pytest.param("tensor=2", marks=SLOW)])
def test_a_step_that_is_not_finite_on_ranks_with_the_same_samples_is_skipped(strategy: str) -> None:
    plants = {step: (2, kind, factor) for step, (_, kind, factor) in PLANTS.items()}
    results = world.run(2, trains, strategy, plants)
    assert_skipped(results, plants)
    assert "the gradient of " in told(results)[0]
    assert "first.weight" in told(results)[0]


@pytest.mark.parametrize("strategy", ["ddp", "pipeline=2", "server=1"])
def test_a_step_by_a_closure_is_that_without(strategy: str) -> None:
    plants = {2: (2, "gradient", math.nan), 4: (2, "loss", math.inf)}
    calls = [(strategy, plants, None, with_closure) for with_closure in (False, True)]
    plain, closed = zip(*world.run(2, in_turn, trains, *calls), strict=True)
    assert_skipped(closed, plants)
    for one, other in zip(plain, closed, strict=True):
        torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def test_a_bucket_names_rank_and_parameter() -> None:
    results = world.run(2, trains, "ddp,bucket_mb=0.0001", PLANTS)
    assert_skipped(results, PLANTS)
    assert "first.weight" in told(results)[0]
    assert "of rank 1" in told(results)[0]


def spoiled_calls(words: list[str], **options: Any) -> tuple[list[bool], list[str]]:
    """Which optimizer steps moved the weights of a run on one rank, and the notes."""
    notes = list[str]()
    run = shoal.init(announce=notes.append, **options)
    model = nn.Linear(3, 2)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    moved = []
    for word in words:
        before = model.weight.detach().clone()
        if word in ("good", "nan"):
            x = torch.ones(2, 3) * (math.nan if word == "nan" else 1.0)
            run.forward_backward(lambda x: model(x).square().mean(), x)
        elif word == "step":
            optimizer.step()
            moved.append(not torch.equal(model.weight, before))
        else:
            optimizer.zero_grad(set_to_none=word == "drop")
    return moved, [note for note in notes if "is not finite: " in note or "the loss is" in note]


@pytest.mark.parametrize(
    ("words", "moves"),
    [
        (["nan", "good", "step", "drop", "good", "step"], [False, True]),
        (["good", "nan", "step", "zero", "good", "step"], [False, True]),
        (["nan", "drop", "good", "step"], [True]),
        (["nan", "zero", "good", "step"], [True]),
    ],
)
def test_calls_that_add_up_to_one_step_are_skipped_together(
    words: list[str], moves: list[bool]
) -> None:
    moved, notes = spoiled_calls(words)
    assert moved == moves
    assert len(notes) == 1


def in_parts(strategy: str) -> tuple[list[bool], int, list[str]]:
    """Whether each of three steps was finite, steps of the average, and notes. In the second step
    the first micro-batch is not finite, in the third both are.
    """
    notes = list[str]()
    run = shoal.init(strategy, accumulate=2, announce=notes.append)
    model = nn.Linear(3, 2).double()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average, finite = run.ema(0.5), []
    for spoiled in ([], [0], [0, 1, 2, 3]):
        x = torch.ones(8, 3).double()
        x[[2 * row for row in spoiled]] = math.nan  # of a micro-batch on a rank: two rows
        optimizer.zero_grad()
        for part in run.microbatches(run.share(x)):
            run.backward(model(part).square().mean())
        finite.append(run.finite)
        optimizer.step()
        average.update()
    return finite, average.steps, [note for note in notes if "is not finite: " in note]


def test_a_step_in_parts_is_counted_and_told_once() -> None:
    finite, averaged, notes = world.run(2, in_parts, "ddp")[0]
    assert finite == [True, False, False]
    assert averaged == 1
    found = [re.search(r"step (\d) is not.*\((\d) so far\)", note) for note in notes]
    assert [match and match.groups() for match in found] == [("2", "1"), ("3", "2")]


def test_so_many_steps_in_a_row_end_the_run_and_others_do_not() -> None:
    step = ["drop", "nan", "step"]
    moved, notes = spoiled_calls([*step, *step, "drop", "good", "step", *step], max_nonfinite=3)
    assert moved == [False, False, True, False]
    assert len(notes) == 3
    with pytest.raises(TrainingDiverged, match="number 3 in a row"):
        spoiled_calls(3 * step, max_nonfinite=3)
    with pytest.raises(TrainingDiverged, match=r"step 1 is not finite: the loss of rank 0 is nan"):
        spoiled_calls(step, nonfinite="stop")


def test_a_run_that_ignores_them_steps_without_a_note() -> None:
    moved, notes = spoiled_calls(2 * ["drop", "nan", "step"], nonfinite="ignore")
    assert moved == [True, True]
    assert notes == []


def spoils_one_shard() -> list[float]:
    """Return how far each row of a weight has moved: the first row's gradient was not finite."""
    run = shoal.init("zero1", announce=lambda _: None)
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for spoiled in (True, False):
        run.forward_backward(
            lambda x, s=spoiled: (model(x)[:, 0].abs().sqrt() if s else model(x)[:, 1]).mean(),
            torch.ones(2, 4),
        )
    optimizer.step()
    return run.weights()["weight"].abs().sum(1).tolist()


def test_a_shard_that_is_not_finite_lets_all_ranks_skip_the_sum_of_calls() -> None:
    assert world.run(2, spoils_one_shard) == [[0.0, 0.0]] * 2


def test_gradients_whose_sum_overflows_are_finite() -> None:
    run = shoal.init(announce=lambda _: None)
    model = nn.Linear(300, 2, bias=False)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-36))
    run.forward_backward(lambda x: model(x).sum(1).mean(), torch.full((2, 300), 3e36))
    optimizer.step()
    assert run.finite


def test_wrong_reactions_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="skip"):
        shoal.init(nonfinite="never")
    with pytest.raises(ConfigError, match="greater than 0"):
        shoal.init(max_nonfinite=0)


def planted(seed: int, ranks: int, count: int) -> dict[int, tuple[int, str, float]]:
    """Seeded plants: step -> (rank, kind, factor), not in the first step of all runs."""
    random_ = random.Random(seed)
    steps = random_.sample(range(STEPS), count)
    return {
        step: (
            random_.randrange(ranks),
            random_.choice(("loss", "gradient")),
            random_.choice((math.nan, math.inf, -math.inf)),
        )
        for step in steps
    }


TABLE = [
    ("single", 1, {}),
    ("single", 1, {"accumulate": 2}),
    *[(name, 2, {}) for name in ("ddp", "zero1", "zero2", "zero3", "server=1", "server=2")],
    ("ddp", 3, {"accumulate": 2}),
    ("ddp,bucket_mb=0.0001", 2, {}),
    ("ddp,bucket_mb=0.0001", 3, {}),
    ("ddp,allreduce=ring", 2, {}),
    ("ddp,compress=fp16", 2, {}),
    ("ddp,compress=topk=0.5", 2, {}),
    ("zero1", 3, {"accumulate": 2}),
    ("zero3,hybrid=2", 4, {}),
    ("pipeline=2", 2, {}),
    ("pipeline=2", 4, {}),
    ("pipeline=2,zero1", 4, {}),
    ("tensor=2", 2, {}),
    ("tensor=2", 4, {}),
    ("tensor=2,zero3", 4, {}),
    ("server=1,compress=fp16", 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("strategy", "ranks", "options"), TABLE)
def test_every_plant_of_a_seeded_table_is_known_in_its_step(
    strategy: str, ranks: int, options: dict[str, Any], seed: int
) -> None:
    plants = planted(seed * 100 + ranks, ranks, 3)  # 3 x 2 x 23 in all
    if "pipeline" in strategy or "tensor" in strategy:
        plants = {step: (ranks, kind, factor) for step, (_, kind, factor) in plants.items()}
    assert_skipped(world.run(ranks, trains, strategy, plants, options), plants)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["local=2", "diloco=2", "server=1,staleness=async"])
def test_ranks_that_step_by_themselves_skip_their_own_steps(strategy: str) -> None:
    results = world.run(2, trains, strategy, PLANTS)
    for rank, result in enumerate(results):
        assert result["whole"]
        assert result["finite"] == [PLANTS.get(step, (-1,))[0] != rank for step in range(STEPS)]
