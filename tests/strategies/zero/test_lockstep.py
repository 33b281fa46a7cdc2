"""Ranks whose samples take different branches get the gradients of one process."""

import random
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, StrategyRefused
from shoal.run.supervised import supervised
from shoal.strategies.zero.lockstep import END_OF_STEP, UnitOrder
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy
from shoal.verification import Experiment

ROWS = 24


class Experts(nn.Module):
    """A block in which each sample uses one expert only, and a scalar of that expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.scales = nn.ParameterList(
            [nn.Parameter(torch.tensor(1.0 + index)) for index in range(3)]
        )
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        for index, (expert, scale) in enumerate(zip(self.experts, self.scales, strict=True)):
            mine = (kind == index)[:, None]
            if mine.any():
                x = x + torch.where(mine, expert(x) * scale, 0.0)
        return x


class Routed(nn.Module):
    """A model whose samples use different blocks, in different orders, once or several times.

    Samples have different numbers of columns.
    """

    ways = ((0, 1), (1, 0), (2, 2, 2), (0, 2, 0), (4,), ())

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.blocks = nn.ModuleList(
            [nn.Linear(5, 5), wide, nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)]
        )
        self.blocks[4].requires_grad_(False)
        self.routers, self.head = nn.ModuleList([Experts(), Experts()]), nn.Linear(5, 4)
        self.never, self.scale = nn.Linear(5, 5), nn.Parameter(torch.tensor(1.5))
        self.rare = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        kind, x = x[:, 0].long(), x[:, 1:]
        for number, way in enumerate(self.ways):
            mine = (kind == number)[:, None]
            if mine.any():
                y = x
                for index in way:
                    y = torch.tanh(self.blocks[index](y))
                self.blocks[3](y)  # what it gives is not used
                x = torch.where(mine, y * self.rare if number == 1 else y, x)
        for router in self.routers:
            x = router(x, kind % 3)
        output: Tensor = self.head(x) * self.scale
        return output


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    # Neighbours take the same way, so that ranks differ.
    x[:, 0] = torch.tensor(
        [2, 2, 0, 1, 4, 3, 5, 5, 1, 0, 3, 3, 2, 4, 0, 0, 1, 1, 5, 4, 0, 2, 1, 3], dtype=x.dtype
    )
    return TensorDataset(x, torch.randint(0, 4, (ROWS,), generator=generator))


def loader() -> DataLoader:
    return DataLoader(rows(), batch_size=5)


ROUTED = Experiment(Routed, loader, F.cross_entropy, steps=6)


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [
        ("zero2", 2, 3),
        pytest.param("zero1", 3, 2, marks=pytest.mark.slow),
        pytest.param("zero3", 4, 2, marks=pytest.mark.slow),
        ("recompute,zero3", 2, 1),
        pytest.param("zero1", 2, 1, marks=pytest.mark.slow),
        pytest.param("zero3", 2, 1, marks=pytest.mark.slow),
        pytest.param("zero3,hybrid=2", 4, 1, marks=pytest.mark.slow),
        pytest.param("zero3,unit=Experts", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_may_use_different_parameters(strategy: str, ranks: int, accumulate: int) -> None:
    check_strategy(strategy, ranks, ROUTED, accumulate)


def prepared(
    strategy: str, model: nn.Module, early: bool = False
) -> tuple[shoal.Run, nn.Module, torch.optim.SGD, DataLoader]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    run = shoal.init(strategy, precision="fp64", step_in_backward=early, announce=lambda _: None)
    optimizer = torch.optim.SGD(
        model.double().parameters(), lr=0.01, momentum=0.9, weight_decay=0.1
    )
    return run, *run.prepare(model, optimizer, loader())


def summed(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(output, target, reduction="sum")}


def trained(strategy: str, early: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    run, model, optimizer, batches = prepared(strategy, Routed(), early)
    for x, y in batches:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    return run.weights(), run.evaluate(supervised(summed, model), DataLoader(rows(), batch_size=2))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_they_are_stepped_and_evaluated_as_on_one_rank(strategy: str, early: bool) -> None:
    expected, sums = trained("single", False)
    for weights, found in world.run(2, trained, strategy, early):
        assert found == pytest.approx(sums, rel=1e-10)
        for name, value in expected.items():
            assert (weights[name] - value).abs().max() <= 1e-10 * value.abs().max(), name


class Again(nn.Module):
    """Blocks under checkpoints of the model's own. Only some samples use the last one."""

    def __init__(self, reentrant: bool, branch: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.routers, self.head = nn.ModuleList([Experts()]), nn.Linear(5, 4)
        self.again, self.branch = partial(checkpoint, use_reentrant=reentrant), branch

    def forward(self, x: Tensor) -> Tensor:
        kind, x = x[:, 0].long(), x[:, 1:].clone().requires_grad_()
        for block in self.blocks[:2]:
            x = torch.tanh(self.again(block, x))
        x = self.again(self.routers[0], x, kind % 3)
        mine = (kind == 0)[:, None]
        if mine.any() or not self.branch:
            x = x + torch.where(mine, self.again(self.blocks[2], x), 0.0)
        output: Tensor = self.head(x)
        return output


@pytest.mark.parametrize(
    ("strategy", "reentrant", "branch"),
    [
        ("zero1", False, True),
        ("zero3,unit=Experts", False, True),
        ("zero3,unit=Experts", True, False),
    ],
)
def test_a_model_may_recompute_by_itself(strategy: str, reentrant: bool, branch: bool) -> None:
    check_strategy(
        strategy, 2, Experiment(partial(Again, reentrant, branch), loader, F.cross_entropy, steps=5)
    )


def one_step(strategy: str, make: Callable[[], nn.Module]) -> None:
    run, model, _, batches = prepared(strategy, make())
    for x, y in batches:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


@pytest.mark.parametrize(
    ("reentrant", "message"),
    [
        (True, r"runs without gradients on some ranks only"),
        (
            False,
            r"routers\.0\.experts\.\d is computed again together with other units, "
            r"and ranks use different ones",
        ),
    ],
)
def test_a_checkpoint_that_ranks_could_not_follow_is_refused(reentrant: bool, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        world.run(2, one_step, "zero3", partial(Again, reentrant, True))


class Borrowed(nn.Module):
    """A block that calls another one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 4)])
        self.blocks[0].register_forward_hook(
            lambda _module, _inputs, output: self.blocks[1](output)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.blocks[0](x)
        return output


def refused() -> str:
    with pytest.raises(StrategyRefused) as refusal:
        one_step("zero3", Borrowed)
    return str(refusal.value)


def test_a_unit_inside_another_is_refused() -> None:
    for said in world.run(2, refused):
        assert "blocks.1 runs inside blocks.0, and is no part of it. Name the class" in said


def runs_of_ranks(ranks: int, passes: list[list[list[int]]]) -> list[list[list[int]]]:
    """Return for each rank and forward pass the runs in which it took part, in order.

    Args: passes: for each forward pass and rank, the runs that the rank needs.
    """
    requests: list[int] = [0] * ranks
    barrier = threading.Barrier(ranks, timeout=10)
    found: list[list[list[int]]] = [[] for _ in range(ranks)]

    def min_over_ranks(rank: int, requested: int) -> int:
        requests[rank] = requested
        barrier.wait()
        number = min(requests)
        barrier.wait()
        return number

    def rank_of(rank: int) -> None:
        unit_order = UnitOrder(partial(min_over_ranks, rank))
        for needed in passes:
            unit_order.begin()
            order: list[int] = []
            for run in [*needed[rank], END_OF_STEP]:
                order += unit_order.units_before(run)
                order += [run] if run != END_OF_STEP else []
            found[rank].append(order)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_take_part_in_the_same_runs_whichever_they_need(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 5])
    passes = [
        [[draw.randrange(6) for _ in range(draw.randrange(5))] for _ in range(ranks)]
        for _ in range(4)
    ]
    orders = runs_of_ranks(ranks, passes)
    assert all(order == orders[0] for order in orders)


def test_a_known_order_is_followed_without_a_message() -> None:
    assert runs_of_ranks(2, [[[0, 2], [0, 4]], [[0], [2, 4]], [[4], [0]]]) == [[[0, 2, 4]] * 3] * 2
    asked: list[int] = []
    order = UnitOrder(lambda requested: asked.append(requested) or requested)
    for _ in range(3):
        order.begin()
        assert [run for needed in (0, 2, END_OF_STEP) for run in order.units_before(needed)] == []
    assert asked == [0, 2, END_OF_STEP, END_OF_STEP, END_OF_STEP]
