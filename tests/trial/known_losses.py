"""54 losses of known training scripts, in the fewest words, and the verdict that each must get."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal.strategies.loss_terms as terms
from shoal.trial import LossKind

N, WIDTH, CLASSES, TOKENS, WORDS = 12, 6, 4, 5, 11


class Case(NamedTuple):
    name: str
    kind: LossKind
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], list[nn.Module]]]


CASES: list[Case] = []


def case(kind: LossKind) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(make.__name__, kind, make))
        return make

    return add


mean, total, counted = case(LossKind.MEAN), case(LossKind.SUM), case(LossKind.COUNTED)
coupled, fails = case(LossKind.COUPLED), case(LossKind.FAILS_ON_PARTS)


def mlp(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


def x(*shape: int) -> Tensor:
    return torch.randn(N, *(shape or (WIDTH,)))


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (N,))


def simple(loss: Callable[[Tensor, Tensor], Any], outputs: int = CLASSES, y: Any = None) -> Any:
    """A loss of a model's output and a target."""
    model = mlp(outputs)
    return (lambda a, b: loss(model(a), b)), (x(), labels() if y is None else y), [model]


class Language(nn.Module):
    """Words to the next words, with the loss inside, as transformers have it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.rnn, self.dropout = nn.GRU(8, 8, batch_first=True), nn.Dropout(dropout)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.dropout(self.rnn(self.dropout(self.words(ids)))[0]))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "logits": logits}


def ids() -> Tensor:
    return torch.randint(0, WORDS, (N, TOKENS))


def padded() -> Tensor:
    targets = ids()
    for row in range(N):
        targets[row, 1 + row % TOKENS :] = -100
    return targets


# Means


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


def ragged() -> list[Tensor]:
    """Images of different heights, one of them as high as the batch has samples."""
    return [torch.randn(3, 4 + row % 9, 5) for row in range(N)]


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


# Samples that influence one another


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


@case(LossKind.CANNOT_JUDGE)
def numpy_noise_for_each_sample() -> Any:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(*a.shape)).float()
        return F.cross_entropy(model(a + noise), y)

    return loss, (x(), labels()), [model]
