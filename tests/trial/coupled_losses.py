"""Losses whose samples influence one another, and randomness that no part can share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loss_cases import (
    CLASSES,
    WIDTH,
    Language,
    N,
    case,
    coupled,
    ids,
    labels,
    mlp,
    padded,
    ragged,
    simple,
    x,
)
from torch import Tensor, nn

from shoal.trial import LossKind


@coupled
def ignored_targets() -> Any:
    y = labels()
    y[::5] = -100
    y[1] = -100
    return simple(F.cross_entropy, y=y)


@coupled
def mean_over_uneven_tokens() -> Any:
    model = Language()
    return (
        lambda a, y: F.cross_entropy(model(a).transpose(1, 2), y),
        (ids(), padded()),
        [model],
    )


@coupled
def class_weights() -> Any:
    weight = torch.tensor([0.1, 1.0, 2.0, 5.0])
    return simple(lambda o, y: F.cross_entropy(o, y, weight=weight))


@coupled
def class_weights_of_a_zero_head() -> Any:
    """Its loss is log C, however it is weighted; only gradients tell."""
    model, weight = mlp(), torch.tensor([0.1, 1.0, 2.0, 5.0])
    nn.init.zeros_(model[2].weight), nn.init.zeros_(model[2].bias)
    return (lambda a, y: F.cross_entropy(model(a), y, weight=weight)), (x(), labels()), [model]


@coupled
def focal_by_positives() -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        bce = F.binary_cross_entropy_with_logits(o, y, reduction="none")
        return ((1 - torch.exp(-bce)) ** 2 * bce).sum() / y.sum().clamp(min=1)

    return simple(loss, y=(torch.rand(N, CLASSES) > 0.7).float())


@coupled
def dice_of_the_batch() -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        p = o.sigmoid()
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum() + 1)

    return simple(loss, y=torch.rand(N, CLASSES).round())


@coupled
def root_of_mean_square() -> Any:
    return simple(lambda o, y: F.mse_loss(o, y).sqrt(), y=x(CLASSES))


@coupled
def hardest_triplets() -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        apart, same = torch.cdist(o, o), y[:, None] == y[None]
        far = (apart * same).max(1).values
        near = apart.masked_fill(same, 1e3).min(1).values
        return F.relu(far - near + 1.0).mean()

    return simple(loss)


def two_views(loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    model = mlp()
    return (lambda a, b: loss(model(a), model(b))), (x(), x()), [model]


@coupled
def contrastive_softmax() -> Any:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        logits = F.normalize(a) @ F.normalize(b).T / 0.1
        return F.cross_entropy(logits, torch.arange(len(a)))

    return two_views(loss)


@coupled
def contrastive_sigmoid() -> Any:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        signs = 2 * torch.eye(len(a)) - 1
        return -F.logsigmoid(signs * (a @ b.T * 5 - 2)).sum() / len(a)

    return two_views(loss)


@coupled
def variance_and_covariance() -> Any:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        centred = a - a.mean(0)
        covariance = centred.T @ centred / max(len(a) - 1, 1)
        spread = F.relu(1 - (a.var(0, unbiased=False) + 1e-4).sqrt()).mean()
        return F.mse_loss(a, b) + spread + covariance.square().mean()

    return two_views(loss)


@coupled
def cross_correlation() -> Any:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        za = (a - a.mean(0)) / (a.std(0, unbiased=False) + 1e-3)
        zb = (b - b.mean(0)) / (b.std(0, unbiased=False) + 1e-3)
        return (za.T @ zb / len(a) - torch.eye(a.shape[1])).square().sum()

    return two_views(loss)


class Mixture(nn.Module):
    """Two experts, and a loss that wants each to get half of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([mlp(), mlp()])

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(a).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 2).float().mean(0)
        balance = 2 * (chosen * gates.mean(0)).sum()
        return sum(gates[:, i : i + 1] * e(a) for i, e in enumerate(self.experts)), balance


@coupled
def balance_of_experts() -> Any:
    model = Mixture()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        output, balance = model(a)
        return F.cross_entropy(output, y) + 0.01 * balance

    return loss, (x(), labels()), [model]


@coupled
def sum_with_penalty_of_weights() -> Any:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(a), y, reduction="sum") + 0.1 * penalty

    return loss, (x(), labels()), [model]


@coupled
def hardest_quarter() -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(o, y, reduction="none")
        return each.topk(len(each) // 4).values.mean()

    return simple(loss)


@coupled
def normalised_importance_weights() -> Any:
    model = mlp()
    return (
        lambda a, y, w: (w / w.sum() * F.cross_entropy(model(a), y, reduction="none")).sum(),
        (x(), labels(), torch.rand(N)),
        [model],
    )


@coupled
def mean_over_pixels_of_ragged_images() -> Any:
    model = nn.Conv2d(3, 1, 3, padding=1)

    def loss(images: list[Tensor]) -> Tensor:
        return torch.cat([model(i[None]).square().flatten() for i in images]).mean()

    return loss, (ragged(),), [model]


@coupled
def batch_mean_taken_by_hand() -> Any:
    return simple(lambda o, y: F.cross_entropy(o - o.mean(0), y))


@coupled
def mixup() -> Any:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        order = torch.randperm(len(a))
        logits = model(0.6 * a + 0.4 * a[order])
        return 0.6 * F.cross_entropy(logits, y) + 0.4 * F.cross_entropy(logits, y[order])

    return loss, (x(), labels()), [model]


@coupled
def survival() -> Any:
    def loss(o: Tensor, times: Tensor) -> Tensor:
        risk = o[:, 0][times.argsort(descending=True)]
        return (risk.logcumsumexp(0) - risk).mean()

    return simple(loss, 1, torch.rand(N))


@coupled
def rewards_less_their_mean() -> Any:
    def loss(o: Tensor, rewards: Tensor) -> Tensor:
        log_p = o.log_softmax(-1)[:, 0]
        return -(log_p * (rewards - rewards.mean())).mean()

    return simple(loss, y=torch.rand(N))


@coupled
def normalised_advantages() -> Any:
    def loss(o: Tensor, gains: Tensor) -> Tensor:
        ratio = (o.log_softmax(-1)[:, 0] - math.log(0.25)).exp()
        gains = (gains - gains.mean()) / (gains.std(unbiased=False) + 1e-6)
        return -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()

    return simple(loss, y=torch.randn(N))


@coupled
def concordance() -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        a, b = o[:, 0], y[:, 0]
        covariance = ((a - a.mean()) * (b - b.mean())).mean()
        spread = a.var(unbiased=False) + b.var(unbiased=False)
        return 1 - 2 * covariance / (spread + (a.mean() - b.mean()) ** 2)

    return simple(loss, 1, x(1))


@coupled
def padded_loss_inside_the_model() -> Any:
    model = Language()
    return (lambda a, y: model(a, y)["loss"]), (ids(), padded()), [model]


# Randomness that no part can share


@case(LossKind.NOT_JUDGED)
def numpy_noise_for_each_sample() -> Any:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(*a.shape)).float()
        return F.cross_entropy(model(a + noise), y)

    return loss, (x(), labels()), [model]
