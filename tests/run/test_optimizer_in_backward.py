"""Stepping inside the backward pass: the weights of an ordinary step, no gradient left, and
refusals that say why.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import ConfigError, LaunchError, UsageError
from shoal.run.supervised import supervised
from shoal.testing import world

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
}


class Odd(nn.Module):
    """A scalar, a parameter used in two places, one that is never used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.blocks[2].weight = self.blocks[1].weight
        self.blocks[0].bias.requires_grad_(False)
        self.unused, self.head = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        output: Tensor = self.head(x)
        return output


class CalledTwice(nn.Module):
    """Its block is a unit of zero3."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head, self.recomputed = (
            nn.ModuleList([nn.Linear(8, 8)]),
            nn.Linear(8, 3),
            recomputed,
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            block = (
                partial(checkpoint, self.blocks[0], use_reentrant=True)
                if self.recomputed
                else self.blocks[0]
            )
            x = torch.tanh(block(x.requires_grad_()))
        output: Tensor = self.head(x)
        return output


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(22, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (22,), generator=generator))


def prepared(
    strategy: str, early: bool, model: nn.Module | None = None, name: str = "SGD"
) -> tuple[Any, ...]:
    run = shoal.init(strategy, precision="fp64", step_in_backward=early, announce=lambda _: None)
    model = (model or Odd()).double()
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    return run, *run.prepare(model, optimizer, DataLoader(data(), batch_size=5, shuffle=True))


def trained(strategy: str, early: bool, name: str) -> tuple[dict[str, Tensor], list[float], bool]:
    """Weights, losses, and whether a gradient was left, after two epochs with a falling
    learning rate.
    """
    run, model, optimizer, loader = prepared(strategy, early, name=name)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, left = [], False
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(run.forward_backward(supervised(F.cross_entropy, model), x, y).item())
            left |= any(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            schedule.step()
    return run.weights(), losses, left


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 1),
        ("zero1", 2),
        pytest.param("zero3,hybrid=2", 4, marks=pytest.mark.slow),
        ("zero2,offload=true", 2),
    ],
)
def test_the_weights_are_those_of_an_ordinary_step(strategy: str, ranks: int, name: str) -> None:
    expected, expected_losses, left = trained("single", False, name)
    assert left
    for weights, losses, left in world.run(ranks, trained, strategy, True, name):
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        assert not left
        for key, weight in weights.items():
            assert (weight - expected[key]).abs().max() <= 1e-10 * expected[key].abs().max(), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_one_rank_they_are_equal_to_the_bit(name: str) -> None:
    expected, weights = trained("single", False, name)[0], trained("single", True, name)[0]
    assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())


def test_never_more_than_one_parameter_holds_a_gradient() -> None:
    run, model, _, loader = prepared("single", early=True)
    seen: list[int] = []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:  # the optimizer's own hook stands before this one
        parameter.register_hook(lambda _: seen.append(sum(p.grad is not None for p in parameters)))
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    assert max(seen) == 0
    assert len(seen) == len(parameters) - 2  # but for the unused ones


def test_hooks_of_a_step_run_once_in_the_loop() -> None:
    run, model, optimizer, loader = prepared("single", early=True)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    assert calls == []
    optimizer.step()
    assert calls == [1]


def test_state_given_back_makes_the_same_next_step() -> None:
    def steps(run: Any, model: nn.Module, optimizer: Any, loader: Any) -> dict[str, Tensor]:
        x, y = next(iter(loader))
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
        return {name: value.clone() for name, value in run.weights().items()}

    first = prepared("single", True, name="AdamW")
    steps(*first)
    tensors, info, private = first[0].state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    expected = steps(*first)
    again = prepared("single", True, name="AdamW")
    again[0].load_state(tensors, info, private)
    again[3].load_state_dict({"epoch": 1, "position": 0})
    found = steps(*again)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 2}, r"accumulate=2 adds up gradients.*accumulate=1, or zero2"),
        ({"precision": "fp16"}, r"fp16 skips a step.*Use bf16"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shoal.init(step_in_backward=True, announce=lambda _: None, **settings)


def test_ddp_on_several_ranks_is_refused_with_the_reason() -> None:
    with pytest.raises(LaunchError, match=r"step_in_backward: ddp .*buckets.*Use zero1"):
        world.run(2, prepared, "ddp", True)


def test_batches_of_ones_own_are_refused() -> None:
    model = Odd()
    with pytest.raises(UsageError, match=r"size of the global batch.*Prepare a loader"):
        shoal.init(step_in_backward=True).prepare(model, torch.optim.SGD(model.parameters()))


def test_a_sum_and_count_loss_is_refused_before_anything_is_stepped() -> None:
    run, model, _, loader = prepared("single", early=True)
    before = {name: weight.clone() for name, weight in run.weights().items()}
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match=r"counted\(sum, count\).*Return a mean"):
        run.forward_backward(
            supervised(
                lambda a, b: shoal.counted(F.cross_entropy(a, b, reduction="sum"), len(b)), model
            ),
            x,
            y,
        )
    assert all(torch.equal(weight, before[name]) for name, weight in run.weights().items())


def test_gradients_cannot_be_read_or_clipped() -> None:
    run, *_ = prepared("single", early=True)
    with pytest.raises(
        UsageError, match=r"clip_gradients: .*norm of all gradients.*step_in_backward=False"
    ):
        run.clip_gradients(1.0)
    with pytest.raises(UsageError, match="gradients: with step_in_backward they have been used"):
        run.gradients()


def test_a_second_backward_pass_before_the_step_is_refused() -> None:
    run, model, _, loader = prepared("single", early=True)
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    with pytest.raises(UsageError, match=r"second one without optimizer\.step"):
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


def test_gradients_from_elsewhere_are_refused() -> None:
    run, model, _, loader = prepared("single", early=True)
    x, y = next(iter(loader))
    model.scale.grad = torch.ones_like(model.scale)
    with pytest.raises(UsageError, match="gradients from elsewhere; scale has one"):
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


def step_of_a_block_called_twice(strategy: str, early: bool, recomputed: bool) -> dict[str, Tensor]:
    run, model, optimizer, loader = prepared(strategy, early, CalledTwice(recomputed))
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    optimizer.step()
    return run.weights()


def test_a_block_that_is_called_twice_is_stepped_once() -> None:
    expected = step_of_a_block_called_twice("single", early=False, recomputed=False)
    for weights in world.run(2, step_of_a_block_called_twice, "zero3", True, False):
        assert all(
            torch.allclose(weight, expected[name], rtol=1e-10) for name, weight in weights.items()
        )


def test_a_gradient_that_comes_in_two_pieces_is_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"blocks\.0\.\w+: its gradient came in two pieces.*use_reentrant=True"
    ):
        step_of_a_block_called_twice("single", early=True, recomputed=True)


def test_an_error_in_the_backward_pass_is_raised_as_it_is() -> None:
    run, model, optimizer, loader = prepared("single", early=True)

    def fails(_: Tensor) -> None:
        raise ValueError("deep inside")

    model.blocks[0].weight.register_hook(fails)
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="deep inside"):
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
    assert len(optimizer.param_groups[0]["params"]) == len(
        [p for p in model.parameters() if p.requires_grad]
    )
