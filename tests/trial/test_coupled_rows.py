"""Samples that influence one another in a loss are told by second derivatives across them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.trial.loss_graph import MOST_NUMBERS, couples_samples

ROWS = 6
Loss = Callable[[Tensor], Tensor]
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
PARTNERS = torch.tensor([1, 0, 3, 2, 5, 4])


def scores(*layers: nn.Module) -> Tensor:
    x = torch.arange(ROWS * 3.0).view(ROWS, 3).cos()
    return nn.Sequential(nn.Linear(3, 5), *layers)(x)


def contrastive(output: Tensor) -> Tensor:
    features = F.normalize(output)
    return F.cross_entropy(features @ features.T - 9 * torch.eye(ROWS), PARTNERS)


APART: dict[str, Loss] = {
    "cross entropy": lambda o: F.cross_entropy(o, LABELS),
    "weights of classes": lambda o: F.cross_entropy(o, LABELS, weight=torch.arange(1.0, 6)),
    "squares": lambda o: o.square().mean(),
    "absolute values": lambda o: o.abs().mean(),
    "a divergence": lambda o: F.kl_div(
        o.log_softmax(1), o.detach().softmax(1), reduction="batchmean"
    ),
    "a mean for each sample": lambda o: o.logsumexp(1).mean(),
    "the largest score of each": lambda o: o.topk(2).values.mean() - o.max(1).values.mean(),
    "a shift by the largest of all": lambda o: (o - o.max()).logsumexp(1).mean() + o.max(),
    "a matrix behind the model": lambda o: (o @ torch.ones(5, 5).cos()).tanh().mean(),
}
TOGETHER: dict[str, Loss] = {
    "similarity of pairs": contrastive,
    "cross correlation": lambda o: (o.T @ o / ROWS - torch.eye(5)).square().sum(),
    "variance": lambda o: F.cross_entropy(o, LABELS) + 0.01 * o.var(0).mean(),
    "root of a mean": lambda o: o.square().mean().sqrt(),
    "overlap": lambda o: 1 - 2 * (o.sigmoid() * LABELS[:, None]).sum() / (o.sigmoid().sum() + 9),
    "triplets": lambda o: F.triplet_margin_loss(o[:2], o[2:4], o[4:], margin=9.0),
    "hard samples": lambda o: F.cross_entropy(o, LABELS, reduction="none").topk(3).values.mean(),
    "hard places": lambda o: o.abs().flatten().sort().values[ROWS:].mean(),
    "the largest loss": lambda o: F.cross_entropy(o, LABELS, reduction="none").max(),
    "the largest of a column": lambda o: o.max(0).values.sum(),
    "normalisation": lambda o: F.cross_entropy((o - o.mean(0)) / (o.std(0) + 1), LABELS),
}


@pytest.mark.parametrize("name", APART)
def test_a_mean_over_samples_couples_none(name: str) -> None:
    output = scores()
    assert not couples_samples(APART[name](output), [output], ROWS)


@pytest.mark.parametrize("name", TOGETHER)
def test_samples_that_are_compared_are_coupled(name: str) -> None:
    output = scores(nn.Tanh())
    assert couples_samples(TOGETHER[name](output), [output], ROWS)


def test_statistics_between_two_models_are_not_the_loss_of_the_second() -> None:
    first = scores(nn.Tanh())
    second = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5))(first)
    loss = F.cross_entropy(second, LABELS) + first.square().mean()
    assert not couples_samples(loss, [first, second], ROWS)
    assert couples_samples(contrastive(second), [first, second], ROWS)


def test_steps_in_time_that_are_compared_couple_no_samples() -> None:
    output = nn.Linear(3, 5)(torch.randn(2 * ROWS, ROWS, 3))  # time first, as of nn.LSTM
    slowness = (output[1:] - output[:-1]).square().mean()
    assert not couples_samples(slowness, [output], ROWS)
    assert couples_samples(output.square().mean().sqrt(), [output], ROWS)


def test_the_backward_pass_comes_to_the_same_after_a_look() -> None:
    model = nn.Linear(3, 5)
    gradients = []
    for looks in (False, True):
        model.zero_grad()
        output = model(torch.ones(ROWS, 3))
        loss = contrastive(output)
        if looks:
            assert couples_samples(loss, [output], ROWS)
        loss.backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
    assert torch.equal(*gradients)


class OnceDifferentiable(torch.autograd.Function):
    """A square whose gradient has none."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return 2 * ctx.saved_tensors[0] * gradient


def test_what_cannot_be_looked_at_is_not_told() -> None:
    output = scores()
    once = OnceDifferentiable.apply(output).sum(0).square().sum()
    assert not couples_samples(once, [output], ROWS)
    assert not couples_samples(contrastive(output), [output], ROWS - 1)  # rows of something else
    assert not couples_samples(contrastive(output), [output], 0)
    assert not couples_samples(contrastive(output), [], ROWS)
    kept = scores()
    kept.retain_grad()
    assert not couples_samples(contrastive(kept), [kept], ROWS)
    many = torch.ones(2, MOST_NUMBERS, requires_grad=True) * 1
    assert not couples_samples(many.var(0).mean(), [many], 2)


def test_hooks_on_outputs_are_called_by_the_backward_pass_alone() -> None:
    calls: list[str] = []
    output = scores(nn.Tanh())
    output.register_hook(lambda gradient: calls.append("hook"))
    loss = contrastive(output)
    assert couples_samples(loss, [output], ROWS)
    assert calls == []
    loss.backward()
    assert calls == ["hook"]


def test_views_of_a_sample_may_be_compared_with_one_another() -> None:
    output = scores()
    for first, second in ((output[:3], output[3:]), (output[::2], output[1::2])):
        assert not couples_samples((first * second).sum(1).tanh().mean(), [output], ROWS // 2)
        assert couples_samples((first @ second.T).logsumexp(1).mean(), [output], ROWS // 2)
