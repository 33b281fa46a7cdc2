"""Losses that are means, sums or counted sums over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loss_cases import (
    CLASSES,
    WIDTH,
    WORDS,
    Language,
    N,
    counted,
    ids,
    labels,
    mean,
    mlp,
    padded,
    ragged,
    simple,
    total,
    x,
)
from torch import Tensor, nn

import shoal.strategies.loss_terms as terms


@mean
def cross_entropy() -> Any:
    return simple(F.cross_entropy)


@mean
def label_smoothing() -> Any:
    return simple(lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1))


@mean
def binary_with_positive_weight() -> Any:
    weight = torch.rand(CLASSES) * 3
    return simple(
        lambda o, y: F.binary_cross_entropy_with_logits(o, y, pos_weight=weight),
        y=torch.rand(N, CLASSES).round(),
    )


@mean
def focal_mean() -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        ce = F.cross_entropy(o, y, reduction="none")
        return ((1 - torch.exp(-ce)) ** 2 * ce).mean()

    return simple(loss)


@mean
def dice_of_each_image() -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        p = o.sigmoid()
        return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1) + 1)).mean()

    return simple(loss, y=torch.rand(N, CLASSES).round())


@mean
def huber() -> Any:
    return simple(F.huber_loss, y=x(CLASSES))


@mean
def absolute_error() -> Any:
    return simple(F.l1_loss, y=x(CLASSES))


@mean
def ctc_mean() -> Any:
    model = nn.Linear(WIDTH, WORDS)

    def loss(a: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        log_p = model(a).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_p, y, torch.full((len(a),), 9), lengths)

    return (
        loss,
        (x(9, WIDTH), torch.randint(1, WORDS, (N, 4)), torch.randint(1, 5, (N,))),
        [model],
    )


@mean
def given_triplets() -> Any:
    model = mlp()
    return (
        lambda a, p, n: F.triplet_margin_loss(model(a), model(p), model(n)),
        (x(), x(), x()),
        [model],
    )


@mean
def multi_margin_hinge() -> Any:
    return simple(F.multi_margin_loss)


@mean
def divergence_batchmean() -> Any:
    return simple(
        lambda o, y: F.kl_div(o.log_softmax(-1), y, reduction="batchmean"),
        y=x(CLASSES).softmax(-1),
    )


@mean
def divergence_mean() -> Any:
    return simple(
        lambda o, y: F.kl_div(o.log_softmax(-1), y, reduction="mean"), y=x(CLASSES).softmax(-1)
    )


@mean
def cosine_embedding() -> Any:
    model = mlp()
    return (
        lambda a, b, y: F.cosine_embedding_loss(model(a), model(b), y),
        (x(), x(), torch.randint(0, 2, (N,)) * 2 - 1),
        [model],
    )


@mean
def mean_of_sequence_means() -> Any:
    model = Language()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(model(a).transpose(1, 2), y, reduction="none")
        mask = y != -100
        return ((each * mask).sum(1) / mask.sum(1)).mean()

    return loss, (ids(), padded()), [model]


@mean
def importance_weights() -> Any:
    model = mlp()
    return (
        lambda a, y, w: (w * F.cross_entropy(model(a), y, reduction="none")).mean(),
        (x(), labels(), torch.rand(N)),
        [model],
    )


def autoencoder(reduce: Callable[[Tensor], Tensor]) -> Any:
    encoder, decoder = nn.Linear(WIDTH, 6), nn.Linear(3, WIDTH)

    def loss(a: Tensor) -> Tensor:
        mu, log_var = encoder(a).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (log_var / 2).exp()
        kl = -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(-1)
        return reduce((decoder(z) - a).square().sum(-1) + kl)

    return loss, (x(),), [encoder, decoder]


@mean
def variational_mean() -> Any:
    return autoencoder(torch.mean)


@mean
def diffusion() -> Any:
    model = nn.Linear(WIDTH + 1, WIDTH)

    def loss(a: Tensor) -> Tensor:
        t = torch.randint(0, 100, (len(a),)).float()[:, None] / 100
        noise = torch.randn_like(a)
        noisy = (1 - t).sqrt() * a + t.sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, t], 1)), noise)

    return loss, (x(),), [model]


@mean
def drop_path() -> Any:
    model = mlp(WIDTH)

    def loss(a: Tensor) -> Tensor:
        keep = (torch.rand(len(a), 1) < 0.7) / 0.7
        return (a + model(a) * keep).square().mean()

    return loss, (x(),), [model]


@mean
def dropout() -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    return (lambda a, y: F.cross_entropy(model(a), y)), (x(), labels()), [model]


@mean
def batch_norm() -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    return (lambda a, y: F.cross_entropy(model(a), y)), (x(), labels()), [model]


@mean
def gradient_penalty() -> Any:
    critic = mlp(1)

    def loss(a: Tensor, fake: Tensor) -> Tensor:
        mixed = (a + torch.rand(len(a), 1) * (fake - a)).requires_grad_()
        (g,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return critic(fake).mean() - critic(a).mean() + 10 * ((g.norm(2, 1) - 1) ** 2).mean()

    return loss, (x(), x()), [critic]


@mean
def mean_with_penalty_of_weights() -> Any:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(a), y) + 0.1 * sum(
            p.square().sum() for p in model.parameters()
        )

    return loss, (x(), labels()), [model]


@mean
def mean_of_ragged_image_means() -> Any:
    model = nn.Conv2d(3, 1, 3, padding=1)

    def loss(images: list[Tensor]) -> Tensor:
        return torch.stack([model(i[None]).square().mean() for i in images]).mean()

    return loss, (ragged(),), [model]


@mean
def one_numpy_number_for_a_batch() -> Any:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        strength = float(np.random.beta(0.4, 0.4))
        return strength * F.cross_entropy(model(a), y) + (1 - strength) * model(a).square().mean()

    return loss, (x(), labels()), [model]


@mean
def loss_inside_the_model() -> Any:
    model = Language(dropout=0.3)
    return (lambda a, y: model(a, y)["loss"]), (ids(), ids()), [model]


@mean
def ignored_targets_that_this_batch_has_not() -> Any:
    """A batch decides what a trial can see."""
    return simple(lambda o, y: F.cross_entropy(o, y, ignore_index=-100))


# Sums and counts


@total
def cross_entropy_sum() -> Any:
    return simple(lambda o, y: F.cross_entropy(o, y, reduction="sum"))


@total
def variational_sum() -> Any:
    return autoencoder(torch.sum)


@counted
def sum_with_count_of_tokens() -> Any:
    model = Language()

    def loss(a: Tensor, y: Tensor) -> Any:
        each = F.cross_entropy(model(a).transpose(1, 2), y, reduction="sum")
        return terms.counted(each, (y != -100).sum())

    return loss, (ids(), padded()), [model]
