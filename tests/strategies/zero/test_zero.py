"""ZeRO beyond the conformance table: memory, clipping, evaluation, scalars, refusals."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from any_step import assert_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

import shoal
from shoal.errors import StrategyRefused
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy
from shoal.verification import Experiment
from tests.harness.in_turn import in_turn
from tests.matrix.cases import image_loader, images


class Scaled(nn.Module):
    """A model with scalar parameters, which are not sharded, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
        self.scale, self.shift = (
            nn.Parameter(torch.tensor(1.5)),
            nn.Parameter(torch.tensor(0.5), requires_grad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x.flatten(1)) * self.scale + self.shift
        return scores


def prepared(
    strategy: str, make: Callable[[], nn.Module]
) -> tuple[shoal.Run, nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    run, model = shoal.init(strategy, announce=lambda _: None), make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    return run, model, optimizer, loader


def clipped(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    run, model, optimizer, loader = prepared(strategy, Scaled)
    norms = []
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        norms.append(run.clip_gradients(0.1).item())
        optimizer.step()
    return norms, run.weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("zero3", 3), ("zero1", 2), ("zero2,hybrid=2", 4)],
)
def test_clipping_sees_the_norm_of_the_whole_gradient(strategy: str, ranks: int) -> None:
    norms, weights = clipped("single")
    for found_norms, found in world.run(ranks, clipped, strategy):
        assert found_norms == pytest.approx(norms, rel=1e-10)
        assert found.keys() == weights.keys()
        assert_same(found, weights)


def held(strategy: str) -> tuple[int, int]:
    run, model, optimizer, loader = prepared(
        strategy, lambda: nn.Sequential(nn.Linear(64, 24), nn.Linear(24, 16))
    )
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x.flatten(1), y)
    optimizer.step()
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in owned)
    states = [optimizer.state[p]["momentum_buffer"] for p in owned]
    return sum(p.to_local().numel() for p in owned), sum(
        state.to_local().numel() for state in states
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_each_rank_holds_its_share_of_parameters_and_optimizer_states(strategy: str) -> None:
    whole = 64 * 24 + 24 + 24 * 16 + 16
    shares = [(whole // 4, whole // 4), (whole // 2, whole // 2)]
    assert world.run(4, in_turn, held, (strategy,), (f"{strategy},hybrid=2",)) == [shares] * 4


def evaluated(
    strategy: str, samples: int, around: Callable[[nn.Module], nn.Module] = lambda model: model
) -> tuple[dict[str, float], bool]:
    run, model, _, _ = prepared(
        strategy, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Linear(12, 10))
    )
    loader = DataLoader(Subset(images(), range(samples)), batch_size=3)
    outer = around(model)
    sums = run.evaluate(
        lambda x, y: {"loss": F.cross_entropy(outer(x), y, reduction="sum")}, loader, outer
    )
    return sums, all(isinstance(p, DTensor) for p in model.parameters())


def test_an_evaluation_with_fewer_batches_on_a_rank_is_exact() -> None:
    cases = (31,), (12,), (2,), (2, nn.Sequential)  # the last one of what stands around the model
    expected = [(evaluated("single", samples)[0], True) for samples, *_ in cases]
    calls = [("zero3", *case) for case in cases]
    assert world.run(3, in_turn, evaluated, *calls) == [expected] * 3


def trained_after_inference(strategy: str) -> dict[str, Tensor]:
    run, model, optimizer, loader = prepared(strategy, Scaled)
    for x, y in loader:
        with torch.inference_mode():
            model(x)
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    with pytest.raises(RuntimeError), torch.inference_mode():
        model(torch.ones(2, 3))
    assert torch.is_grad_enabled()
    return run.weights()


def test_a_model_may_first_be_called_in_inference_mode() -> None:
    expected = trained_after_inference("single")
    for found in world.run(2, trained_after_inference, "zero3"):
        assert_same(found, expected)


class WritesIntoViews(nn.Module):
    """A model that writes into the outputs of a unit.

    If an output is a view, that could drop the node which gathers in the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 10, batch_first=True)]
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layers[0](x.squeeze(1))
        hidden += 1.0
        out, _ = self.layers[1](hidden)
        last: Tensor = out[:, -1]
        return last


def trained_on_views(strategy: str) -> dict[str, Tensor]:
    run, model, optimizer, loader = prepared(strategy, WritesIntoViews)
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    return run.weights()


@pytest.mark.slow
def test_a_model_may_write_into_what_a_unit_gives() -> None:
    expected = trained_on_views("single")
    for found in world.run(2, trained_on_views, "zero3"):
        assert_same(found, expected)


class Sharing(nn.Module):
    """Two blocks with the same module inside, and one block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        shared, twice = nn.Linear(64, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 64), shared, nn.Tanh()) for _ in range(2)]
        )
        self.layers.extend([twice, twice, nn.Linear(64, 10)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "recompute,zero3", "zero3,unit=Linear"])
def test_modules_may_be_shared(strategy: str) -> None:
    check_strategy(strategy, 2, Experiment(Sharing, image_loader, F.cross_entropy, steps=3))


def channels_last() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_weights_in_channels_last_are_sharded() -> None:
    check_strategy("zero3", 2, Experiment(channels_last, image_loader, F.cross_entropy, steps=3))


class Outside(nn.Module):
    """A model that uses a block's weight outside of the block, before and after it has run."""

    def __init__(self, before: bool, tied: bool = False) -> None:
        super().__init__()
        self.layers, self.before = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)), before
        if tied:
            self.borrowed = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        x = F.linear(x, self.layers[0].weight) if self.before else x
        scores: Tensor = self.layers(x) + F.linear(x, self.layers[0].weight)[:, :10]
        return scores


def uses_outside(strategy: str, before: bool) -> str:
    run, model, _, loader = prepared(strategy, lambda: Outside(before))
    with pytest.raises(StrategyRefused) as refusal:
        run.forward_backward(supervised(F.cross_entropy, model), *next(iter(loader)))
    return str(refusal.value)


def test_a_weight_that_is_used_outside_its_unit_is_refused_with_a_cure() -> None:
    calls = ("zero3", False), ("zero3", True), ("zero1", True)
    for refusals in world.run(2, in_turn, uses_outside, *calls):
        for said, (strategy, _) in zip(refusals, calls, strict=True):
            assert f"{strategy}: a weight of one unit is used outside of that unit" in said


@pytest.mark.parametrize(
    ("strategy", "before", "tied"),
    [pytest.param("zero2", False, False, marks=pytest.mark.slow), ("zero3", True, True)],
)
def test_the_cures_work(strategy: str, before: bool, tied: bool) -> None:
    check_strategy(
        strategy,
        2,
        Experiment(partial(Outside, before, tied), image_loader, F.cross_entropy, steps=3),
    )


def refused(strategy: str, trainable: bool) -> str:
    with pytest.raises(StrategyRefused) as refusal:
        prepared(strategy, lambda: nn.Linear(3, 3).requires_grad_(trainable))
    return str(refusal.value)


def test_what_cannot_be_sharded_is_refused_on_every_rank() -> None:
    calls = ("zero3,hybrid=3", True), ("zero1", False), ("zero3,unit=Blok", True)
    for groups, frozen, unit in world.run(4, in_turn, refused, *calls):
        assert "4 ranks do not make whole groups. Use a divisor of 4" in groups
        assert "the model has no such parameter" in frozen
        assert "unit=Blok: the model has no module of that class" in unit


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8).bfloat16(), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.bfloat16()) * self.scale


def two_dtypes() -> str:
    run = shoal.init("zero3", announce=lambda _: None)
    model = nn.Sequential(TwoDtypes(), TwoDtypes())
    with pytest.raises(StrategyRefused) as refusal:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(refusal.value)


def test_two_dtypes_in_a_unit_are_refused_with_both_names() -> None:
    for text in world.run(2, two_dtypes):
        assert "0.scale (torch.float32) and 0.linear.weight (torch.bfloat16)" in text
        assert "model.float()" in text


class ListedLayer(nn.Linear):
    """A layer that overrides `parameters`, as the learner of MAML-Pytorch does."""

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return [self.weight, self.bias]


class HeadedLayers(nn.Module):
    """A layer in a unit, and one in none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ListedLayer(4, 4)])
        self.head = ListedLayer(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))  # type: ignore[no-any-return]


def kept_graph() -> str:
    """Train a generator by a sample that was made before the step of its critic."""
    run = shoal.init("zero3", announce=lambda _: None)
    generator, critic = HeadedLayers(), nn.Sequential(nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    generator, critic, *_ = run.prepare(generator, critic, *optimizers)
    fake = generator(torch.ones(2, 4))
    run.backward(critic(fake.detach()).mean(), rows=2)
    with pytest.raises(StrategyRefused) as refusal:
        run.backward(critic(fake).mean(), rows=2)
    return str(refusal.value)


def test_a_graph_of_before_the_last_step_is_refused_with_its_cure() -> None:
    for text in world.run(2, kept_graph):
        assert "computed before the last step" in text
        assert "fake = generator(z)" in text
