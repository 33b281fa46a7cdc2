"""A loss of vocab parallel logits has the value and the gradient of a loss of all logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shoal
from shoal.comm.axis import Axis
from shoal.comm.mappings import copy_to_region
from shoal.errors import StrategyRefused
from shoal.strategies.tensor.vocabulary import VocabParallelLogits
from shoal.testing import world

WORDS = 8
TARGET = torch.tensor([0, 3, 5, 7, 1])


def masked(x: Tensor) -> Tensor:
    x[..., 2] = -30.0
    return F.cross_entropy(x, TARGET) + x.argmax(-1).sum()


def scaled(x: Tensor) -> Tensor:
    x.div_(3.0).sub_(x.mean(-1, keepdim=True) ** 2)
    return F.cross_entropy(x, TARGET)


def written_through_a_view(x: Tensor) -> Tensor:
    x.softmax(-1)
    x[..., 2].fill_(-30.0)
    return F.cross_entropy(x, TARGET)


def written_unseen_by_autograd(x: Tensor) -> Tensor:
    with torch.no_grad():
        x[..., 2] = -3.0
    return F.cross_entropy(x, TARGET)


def written_after_the_loss(x: Tensor) -> Tensor:
    loss = F.cross_entropy(x.view(-1, WORDS), TARGET)
    copy = x.clone()
    copy[..., :4] = -30.0
    x.mul_(2.0)
    return loss + x.argmax(-1).sum() + F.cross_entropy(copy, TARGET) + F.cross_entropy(x, TARGET)


def looked_at_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.softmax(-1)
    with torch.inference_mode():
        x.exp()
    return F.cross_entropy(x, TARGET) + 0.1 * x.logsumexp(-1).square().sum()


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum() * 0.01

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * 0.02 * gradient


def with_a_function_of_its_own(x: Tensor) -> Tensor:
    return F.cross_entropy(x, TARGET) + Squares.apply(x.view(5, WORDS))


class Tenth(torch.autograd.Function):
    """Returns its input, or a copy, with a tenth of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: bool) -> Tensor:
        return x.clone() if copies else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 0.1 * gradient, None


def through_functions_of_its_own(x: Tensor) -> Tensor:
    copy, same = Tenth.apply(x, True), Tenth.apply(x, False)
    losses = [F.cross_entropy(logits, TARGET) for logits in (x, copy, same)]
    return torch.stack(losses).sum() + copy.exp().mean()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient / gradient.norm())
    return F.cross_entropy(x, TARGET)


LOSSES = (
    *(masked, scaled, written_through_a_view, written_unseen_by_autograd, written_after_the_loss),
    *(
        looked_at_without_gradients,
        with_a_function_of_its_own,
        through_functions_of_its_own,
        hooked,
    ),
)


def logits_and_slice(axis: Axis) -> tuple[Tensor, slice]:
    torch.manual_seed(1)
    own = slice(axis.rank * WORDS // 2, (axis.rank + 1) * WORDS // 2)
    return torch.randn(5, WORDS, dtype=torch.float64, requires_grad=True), own


def largest_difference(loss: Callable[[Tensor], Tensor], axis: Axis) -> float:
    """Return the largest difference of value and gradient from a loss of all logits."""
    x, own = logits_and_slice(axis)
    expected, found = loss(x * 1.0), loss(VocabParallelLogits.of(x[:, own] * 1.0, axis))
    (all_of_it,), (of_slices,) = torch.autograd.grad(expected, x), torch.autograd.grad(found, x)
    assert all_of_it.abs().max() > 1e-3
    return max((expected - found).abs().item(), (all_of_it - of_slices)[:, own].abs().max().item())


def refused_writes(axis: Axis) -> list[str]:
    def a_view(x: Tensor) -> Tensor:
        return x.view(5, WORDS).div_(3.0)

    def beside_a_view(x: Tensor) -> Tensor:
        rows = x.view(5, WORDS)
        x[..., 2] = -30.0
        return rows

    def a_view_of_a_view(x: Tensor) -> Tensor:
        x.view(5, WORDS)[:, 2].fill_(-30.0)
        return F.cross_entropy(x, TARGET)

    messages = []
    for write in (a_view, beside_a_view, a_view_of_a_view):
        x, own = logits_and_slice(axis)
        with pytest.raises(StrategyRefused) as refusal:
            write(VocabParallelLogits.of(x[:, own] * 1.0, axis))
        messages.append(str(refusal.value))
    return messages


def largest_difference_of_a_penalty(axis: Axis) -> float:
    """Return the largest difference of the head's gradient where the slope of the loss is in it."""
    whole, own = logits_and_slice(axis)
    hidden, head = torch.ones(5, 5, dtype=torch.float64, requires_grad=True), whole.detach()
    head = head.requires_grad_()

    def penalty(logits: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, TARGET, label_smoothing=0.1) + 0.1 * logits.exp().mean()
        (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + slope.square().sum()

    expected = penalty(hidden @ head)
    found = penalty(VocabParallelLogits.of(copy_to_region(hidden, axis) @ head[:, own], axis))
    (of_all,), (of_slices,) = (torch.autograd.grad(loss, head) for loss in (expected, found))
    return (of_all - of_slices)[:, own].abs().max().item()


def run_all() -> tuple[dict[str, float], list[str]]:
    axis = shoal.init("tensor=2", announce=lambda _: None).mesh.tensor
    found = {loss.__name__: largest_difference(loss, axis) for loss in LOSSES}
    return found | {"penalty": largest_difference_of_a_penalty(axis)}, refused_writes(axis)


def test_a_loss_of_divided_logits_is_that_of_all_logits() -> None:
    for found, messages in world.run(2, run_all):
        assert {name: error for name, error in found.items() if not error < 1e-14} == {}
        assert all("others have views of it" in text for text in messages)
