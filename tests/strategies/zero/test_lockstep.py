"""Ranks gather units in one order; samples that take different branches are refused."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from any_step import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, StrategyRefused
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy
from shoal.verification import Experiment
from tests.harness.in_turn import in_turn

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
    """A layer, and experts of which a rank computes those that its samples ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.ModuleList([nn.Linear(5, 4)]), nn.ModuleList([Experts()])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.first[0](self.experts[0](x[:, 1:], x[:, 0].long() % 3))
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


def prepared(
    strategy: str, model: nn.Module
) -> tuple[shoal.Run, nn.Module, torch.optim.SGD, DataLoader]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    optimizer = torch.optim.SGD(
        model.double().parameters(), lr=0.01, momentum=0.9, weight_decay=0.1
    )
    return run, *run.prepare(model, optimizer, loader())


class Again(nn.Module):
    """Blocks under checkpoints of the model's own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]), nn.Linear(6, 4)
        self.again = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = torch.tanh(self.again(block, x))
        output: Tensor = self.head(x)
        return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "reentrant"), [("zero1", False), ("zero3", False), ("zero3", True)]
)
def test_a_model_may_recompute_by_itself(strategy: str, reentrant: bool) -> None:
    check_strategy(
        strategy, 2, Experiment(partial(Again, reentrant), loader, F.cross_entropy, steps=5)
    )


def one_step(strategy: str, make: Callable[[], nn.Module]) -> None:
    run, model, _, batches = prepared(strategy, make())
    for x, y in batches:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


class Heads(nn.Module):
    """A body, and a head of its own for each task; one of the heads waits in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
        self.heads = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, task: int) -> Tensor:
        output: Tensor = self.heads[task](torch.tanh(self.bodies[task](x))) * self.scale
        return output


def trained_in_turn(strategy: str) -> dict[str, Tensor]:
    """Train two tasks by one function, which begins with another block for each of them."""
    run, model, optimizer, batches = prepared(strategy, Heads())

    def loss(task: int, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, task), y)

    for step, (x, y) in enumerate([*batches] * 2):
        optimizer.zero_grad()
        run.forward_backward(partial(loss, step % 2), x, y)
        optimizer.step()
    return run.weights()


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_a_function_may_begin_with_other_blocks_in_other_steps(strategy: str) -> None:
    expected = trained_in_turn("single")
    for weights in world.run(2, trained_in_turn, strategy):
        assert_same(weights, expected)


class Later(Heads):
    """Heads on one body: which one is used shows only behind it."""

    def forward(self, x: Tensor, task: int) -> Tensor:
        output: Tensor = self.heads[task](torch.tanh(self.bodies[0](x)))
        return output


def one_function_for_two_tasks(strategy: str) -> None:
    run, model, _, batches = prepared(strategy, Later())
    for step, (x, y) in enumerate(batches):
        run.forward_backward(lambda x, y, i=step % 2: F.cross_entropy(model(x, i), y), x, y)


def test_a_step_that_leaves_the_order_is_refused_with_the_cure() -> None:
    with pytest.raises(
        LaunchError, match=r"heads\.1 comes where other blocks .* give each kind of step a function"
    ):
        world.run(2, one_function_for_two_tasks, "zero3")


def thawed_between_losses_of_the_loop() -> None:
    run = shoal.init("zero3", announce=lambda _: None)
    layers = [nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 4)]
    model = nn.Sequential(*layers).double()
    model[:2].requires_grad_(False)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        if step:
            model.requires_grad_(True)
        x = run.share(torch.ones(8, 5).double())
        run.backward(model(x).square().mean())


def test_a_layer_that_is_unfrozen_in_the_loop_is_named() -> None:
    with pytest.raises(LaunchError, match=r"0\.weight, .* unfrozen after prepare, .* rate of 0 as"):
        world.run(2, thawed_between_losses_of_the_loop)


def losses_with_one_left_out(strategy: str, cure: bool) -> list[float]:
    run, model, optimizer, batches = prepared(strategy, Later())
    losses = []
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, 0), y)
        if number == 0:
            if cure:
                run.backward(0 * loss)
            continue
        losses.append(float(run.backward(loss)))
        optimizer.step()
    return losses


def test_a_loss_that_a_loop_leaves_out_is_refused_and_its_cure_is_exact() -> None:
    with pytest.raises(LaunchError, match=r"calls run\.backward\(0 \* loss\) in place of"):
        world.run(2, losses_with_one_left_out, "zero1", False)
    (alone,) = world.run(1, losses_with_one_left_out, "single", True)
    assert len(alone) > 1
    for losses in world.run(2, losses_with_one_left_out, "zero1", True):
        assert losses == pytest.approx(alone, abs=1e-12)


def another_function_on_each_rank() -> None:
    run, model, _, batches = prepared("zero3", Later())
    x, y = next(iter(batches))
    losses = (
        (lambda x, y: F.cross_entropy(model(x, 0), y)),
        (lambda x, y: F.cross_entropy(model(x, 0) + model(x, 1), y)),
    )
    run.forward_backward(losses[torch.distributed.get_rank()], x, y)


def test_ranks_that_compute_other_functions_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"comes where other blocks of the model come"):
        world.run(2, another_function_on_each_rank)


def refused(strategy: str, make: Callable[[], nn.Module]) -> str:
    with pytest.raises(StrategyRefused) as refusal:
        one_step(strategy, make)
    return str(refusal.value)


def test_ranks_whose_samples_take_different_branches_are_refused() -> None:
    calls = [(strategy, Routed) for strategy in ("zero1", "zero2", "zero3")]
    words = r"come on another rank, .* one unit, unit=CLASS; .* or use ddp"
    for refusals in world.run(2, in_turn, refused, *calls):
        for said in refusals:
            assert re.search(words, said), said


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2,unit=Experts", "zero3,unit=Experts"])
def test_experts_in_one_unit_train_as_on_one_device(strategy: str) -> None:
    check_strategy(strategy, 2, Experiment(Routed, loader, F.cross_entropy, steps=5))


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


def test_a_unit_inside_another_is_refused() -> None:
    for said in world.run(2, refused, "zero3", Borrowed):
        assert "blocks.1 runs inside blocks.0, and is no part of it. Name the class" in said
