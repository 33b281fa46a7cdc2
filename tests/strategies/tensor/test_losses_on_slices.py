"""Losses that use weights, methods or several models are those of one device, or are refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.mappings import copy_to_region, local_slice, reduce_from_region
from shoal.comm.norm import full_tensor
from shoal.errors import StrategyRefused, UsageError
from shoal.strategies.tensor.parallel_layers import regroup_qkv
from shoal.testing import world


class Encoder(nn.Module):
    """A pair of linear layers, and one of convolutions, that methods call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 6)
        self.first, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.last, self.head = nn.Conv1d(4, 1, 3, padding=1), nn.Linear(6, 3)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.act(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.encode(x))
        x = self.last(torch.relu(self.norm(self.first(x.unsqueeze(1))))).squeeze(1)
        scores: Tensor = self.head(x)
        return scores


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (12,), generator=generator))


def plain(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def with_l1(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + 0.01 * sum(p.abs().sum() for p in model.parameters())


def with_l2(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    flat = nn.utils.parameters_to_vector(model.parameters())
    norms = torch.stack([p.norm() for p in model.parameters()])
    return plain(model, x, y) + 0.1 * norms.sum() + 0.1 * flat.square().sum()


def with_weights_as_values(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    hidden = F.linear(x, model.up.weight, model.up.bias)
    gram = model.up.weight.T @ model.up.weight + model.first.weight[0, 0, 0]
    return plain(model, x, y) + hidden.tanh().mean() + gram.square().sum()


def with_a_gradient_penalty(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return plain(model, x, y) + (slope.norm(dim=1) - 1).square().mean()


EXACT = (plain, with_a_gradient_penalty)


def with_a_method(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + model.encode(x).square().mean()


def with_the_row_layer_alone(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + model.down(x.new_ones(2, 12)).square().mean()


def with_a_convolution_alone(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + model.first(x.unsqueeze(1)).square().mean()


def with_the_norm_of_a_pair_alone(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return plain(model, x, y) + model.norm(x.new_ones(2, 4, 5)).square().mean()


def write_in_place(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        model.up.weight.mul_(0.5)
    return plain(model, x, y)


def write_a_detached_one(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    model.up.weight.detach().mul_(0.5)
    return plain(model, x, y)


def ask_for_its_gradient(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, x, y)
    (gradient,) = torch.autograd.grad(loss, model.up.weight, create_graph=True)
    return loss + gradient.square().sum()


def step_inside(model: Encoder, x: Tensor, y: Tensor) -> Tensor:
    moved = {name: p - 0.1 * p.detach() for name, p in model.named_parameters()}
    scores = torch.func.functional_call(model, moved, (x,))
    return F.cross_entropy(scores, y)


REFUSED = {
    with_a_method: "was called from outside",
    with_the_row_layer_alone: "was called from outside",
    with_a_convolution_alone: "was called from outside",
    with_the_norm_of_a_pair_alone: "was called from outside",
    with_l1: "uses up.weight outside of its layer, in abs, .*whole=up; or use ddp",
    with_l2: "uses up.weight outside of its layer",
    with_weights_as_values: "uses up.weight outside of its layer, in linear",
    write_in_place: "uses up.weight outside of its layer, in mul_",
    write_a_detached_one: "uses up.weight outside of its layer, in detach",
    step_inside: "uses up.weight outside of its layer, in detach",
    ask_for_its_gradient: "uses up.weight outside of its layer, in grad",
}


def gradients(
    strategy: str, loss_of: Callable[..., Any], make: Callable[[], nn.Module] = Encoder
) -> dict[str, Tensor]:
    """Take one step without an update, and return the loss and all full gradients."""
    run = shoal.init(strategy, precision="fp64", seed=0, announce=lambda _: None)
    torch.manual_seed(3)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = run.prepare(model, optimizer, DataLoader(rows(), batch_size=12))
    x, y = next(iter(loader))
    loss = run.forward_backward(lambda x, y: loss_of(model, x, y), x, y)
    found = {n: full_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": torch.as_tensor(float(loss), dtype=torch.float64)}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-13)


def exact_gradients(strategy: str) -> list[dict[str, Tensor]]:
    return [gradients(strategy, loss_of) for loss_of in EXACT]


def refusals(strategy: str) -> list[str]:
    found = []
    for loss_of in REFUSED:
        with pytest.raises((StrategyRefused, UsageError)) as refusal:
            gradients(strategy, loss_of)
        found.append(str(refusal.value))
    return found


def exact_and_refused(strategy: str) -> tuple[list[dict[str, Tensor]], list[str]]:
    return exact_gradients(strategy), refusals(strategy)


def test_weights_and_layers_by_themselves_are_refused_in_a_loss() -> None:
    single = exact_gradients("single")
    for found, said in world.run(2, exact_and_refused, "tensor=2"):
        for one, other in zip(single, found, strict=True):
            assert_same(one, other)
        for message, pattern in zip(said, REFUSED.values(), strict=True):
            assert re.search(pattern, message), message


def train_two(strategy: str) -> tuple[list[float], dict[str, Tensor], float]:
    """Train a student against a frozen teacher and another student, with a batch of names."""
    run = shoal.init(strategy, precision="fp64", seed=0, announce=lambda _: None)
    torch.manual_seed(3)
    one, two, teacher = Encoder().double(), Encoder().double(), Encoder().double()
    teacher.requires_grad_(False).eval()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    one, two, teacher, *optimizers, loader = run.prepare(
        one, two, teacher, *optimizers, DataLoader(rows(), batch_size=6)
    )

    def compute_loss(*, x: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            goal = teacher(x)
        found = F.cross_entropy(one(x=x), labels) + F.mse_loss(two(x), goal)
        return found, {"goal": goal}

    losses = []
    for x, labels in loader:
        loss, extra = run.forward_backward(compute_loss, x=x, labels=labels)
        losses.append(float(loss) + float(extra["goal"].sum()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compute_sums(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(one(x), labels, reduction="sum")}

    sums = run.evaluate(compute_sums, DataLoader(rows(), batch_size=5))
    weights = {
        f"{i}.{n}": full_tensor(p)
        for i, m in enumerate((one, two))
        for n, p in m.named_parameters()
    }
    return losses, weights, sums["loss"]


@pytest.mark.slow
def test_several_models_and_a_batch_of_names_train_and_evaluate_as_on_one_device() -> None:
    losses, weights, loss = train_two("single")
    for other_losses, other_weights, other_loss in world.run(2, train_two, "tensor=2"):
        assert other_losses == pytest.approx(losses, rel=1e-10)
        assert other_loss == pytest.approx(loss, rel=1e-10)
        assert_same(weights, other_weights)


def slopes_through_a_fused_matrix() -> float:
    """Return the largest difference of second gradients to those of the whole matrix."""
    axis = shoal.init("tensor=2", announce=lambda _: None).mesh.tensor
    torch.manual_seed(0)
    whole, x = (torch.randn(*shape, dtype=torch.float64) for shape in ((12, 4), (3, 4)))

    def penalty(weight: Tensor, given: Tensor, x: Tensor) -> Tensor:
        sums = (given @ weight.T).tanh().sum(1)
        sums = sums if weight is whole else reduce_from_region(sums, axis)
        (slope,) = torch.autograd.grad(sums.sum(), x, create_graph=True)
        return slope.square().sum()

    stored = local_slice(whole, axis, 0).clone().requires_grad_()
    whole, x = whole.requires_grad_(), x.requires_grad_()
    (expected,) = torch.autograd.grad(penalty(whole, x, x), whole)
    sliced = penalty(regroup_qkv(stored, axis, 3), copy_to_region(x, axis), x)
    (found,) = torch.autograd.grad(sliced, stored)
    return (found - local_slice(expected, axis, 0)).abs().max().item()


def test_gradients_of_gradients_go_through_a_fused_matrix() -> None:
    assert max(world.run(2, slopes_through_a_fused_matrix)) < 1e-10
