"""54 losses of known training scripts, in the fewest words, and the verdict that each must get."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal.strategies.loss_terms as terms
from shoal.trial import LossKind

N, WIDTH, CLASSES, TOKENS, WORDS = 12, 6, 4, 5, 11
Loss = Callable[..., Any]
Made = tuple[Loss, tuple[Any, ...], list[nn.Module]]
"""A loss of a batch, the batch, and the models."""


class Case(NamedTuple):
    name: str
    kind: LossKind
    make: Callable[[], Made]


def mlp(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


def x(*shape: int) -> Tensor:
    return torch.randn(N, *(shape or (WIDTH,)))


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (N,))


def bits() -> Tensor:
    return torch.rand(N, CLASSES).round()


def ids() -> Tensor:
    return torch.randint(0, WORDS, (N, TOKENS))


def padded() -> Tensor:
    targets = ids()
    for row in range(N):
        targets[row, 1 + row % TOKENS :] = -100
    return targets


def ragged() -> list[Tensor]:
    """Images of different heights, one of them as high as the batch has samples."""
    return [torch.randn(3, 4 + row % 9, 5) for row in range(N)]


def simple(loss: Loss, outputs: int = CLASSES, y: Tensor | None = None) -> Made:
    """A loss of a model's output and a target."""
    return of_model(loss, mlp(outputs), labels() if y is None else y)


def of_model(loss: Loss, model: nn.Module, *targets: Tensor) -> Made:
    return (lambda a, *rest: loss(model(a), *rest)), (x(), *targets), [model]


def of_views(loss: Loss, views: int = 2, *targets: Tensor) -> Made:
    """A loss of the outputs for several inputs."""
    model = mlp()

    def compute_loss(*batch: Tensor) -> Any:
        return loss(*map(model, batch[:views]), *batch[views:])

    return compute_loss, (*(x() for _ in range(views)), *targets), [model]


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


def of_tokens(loss: Loss) -> Made:
    """A loss of scores (samples, words, tokens) and padded targets."""
    model = Language()
    return (lambda a, y: loss(model(a).transpose(1, 2), y)), (ids(), padded()), [model]


def inside_the_model(targets: Tensor, dropout: float = 0.0) -> Made:
    model = Language(dropout)
    return (lambda a, y: model(a, y)["loss"]), (ids(), targets), [model]


def of_images(loss: Callable[[list[Tensor]], Tensor]) -> Made:
    """A loss of the outputs for images of other sizes each."""
    model = nn.Conv2d(3, 1, 3, padding=1)
    return (lambda images: loss([model(i[None]) for i in images])), (ragged(),), [model]


# Means over samples


def focal(o: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(o, y, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def dice_of_each_image(o: Tensor, y: Tensor) -> Tensor:
    p = o.sigmoid()
    return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1) + 1)).mean()


def ctc() -> Made:
    model = nn.Linear(WIDTH, WORDS)

    def loss(a: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        log_p = model(a).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_p, y, torch.full((len(a),), 9), lengths)

    words = torch.randint(1, WORDS, (N, 4)), torch.randint(1, 5, (N,))
    return loss, (x(9, WIDTH), *words), [model]


def mean_of_sequence_means(o: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    each = F.cross_entropy(o, y, reduction="none")
    return ((each * mask).sum(1) / mask.sum(1)).mean()


def weighed(o: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (w * F.cross_entropy(o, y, reduction="none")).mean()


def autoencoder(reduce: Callable[[Tensor], Tensor]) -> Made:
    encoder, decoder = nn.Linear(WIDTH, 6), nn.Linear(3, WIDTH)

    def loss(a: Tensor) -> Tensor:
        mu, log_var = encoder(a).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (log_var / 2).exp()
        kl = -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(-1)
        return reduce((decoder(z) - a).square().sum(-1) + kl)

    return loss, (x(),), [encoder, decoder]


def diffusion() -> Made:
    model = nn.Linear(WIDTH + 1, WIDTH)

    def loss(a: Tensor) -> Tensor:
        t = torch.randint(0, 100, (len(a),)).float()[:, None] / 100
        noise = torch.randn_like(a)
        noisy = (1 - t).sqrt() * a + t.sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, t], 1)), noise)

    return loss, (x(),), [model]


def drop_path() -> Made:
    model = mlp(WIDTH)

    def loss(a: Tensor) -> Tensor:
        keep = (torch.rand(len(a), 1) < 0.7) / 0.7
        return (a + model(a) * keep).square().mean()

    return loss, (x(),), [model]


def behind(layer: nn.Module) -> Made:
    model = nn.Sequential(nn.Linear(WIDTH, 8), layer, nn.Linear(8, CLASSES))
    return of_model(F.cross_entropy, model, labels())


def gradient_penalty() -> Made:
    critic = mlp(1)

    def loss(a: Tensor, fake: Tensor) -> Tensor:
        mixed = (a + torch.rand(len(a), 1) * (fake - a)).requires_grad_()
        (g,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return critic(fake).mean() - critic(a).mean() + 10 * ((g.norm(2, 1) - 1) ** 2).mean()

    return loss, (x(), x()), [critic]


def with_penalty_of_weights(reduction: str) -> Made:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(a), y, reduction=reduction) + 0.1 * penalty

    return loss, (x(), labels()), [model]


def one_numpy_number_for_a_batch(o: Tensor, y: Tensor) -> Tensor:
    strength = float(np.random.beta(0.4, 0.4))
    return strength * F.cross_entropy(o, y) + (1 - strength) * o.square().mean()


def counted_tokens(o: Tensor, y: Tensor) -> Any:
    return terms.counted(F.cross_entropy(o, y, reduction="sum"), (y != -100).sum())


# Losses whose samples influence one another


def some_ignored() -> Tensor:
    y = labels()
    y[::5] = -100
    y[1] = -100
    return y


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 5.0])
by_classes = partial(F.cross_entropy, weight=CLASS_WEIGHTS)


def class_weights_of_a_zero_head() -> Made:
    """Its loss is log C, however it is weighted; only gradients tell."""
    model = mlp()
    nn.init.zeros_(model[2].weight), nn.init.zeros_(model[2].bias)
    return of_model(by_classes, model, labels())


def focal_by_positives(o: Tensor, y: Tensor) -> Tensor:
    bce = F.binary_cross_entropy_with_logits(o, y, reduction="none")
    return ((1 - torch.exp(-bce)) ** 2 * bce).sum() / y.sum().clamp(min=1)


def dice_of_the_batch(o: Tensor, y: Tensor) -> Tensor:
    p = o.sigmoid()
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum() + 1)


def hardest_triplets(o: Tensor, y: Tensor) -> Tensor:
    apart, same = torch.cdist(o, o), y[:, None] == y[None]
    far = (apart * same).max(1).values
    near = apart.masked_fill(same, 1e3).min(1).values
    return F.relu(far - near + 1.0).mean()


def contrastive_softmax(a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a) @ F.normalize(b).T / 0.1
    return F.cross_entropy(logits, torch.arange(len(a)))


def contrastive_sigmoid(a: Tensor, b: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(a)) - 1
    return -F.logsigmoid(signs * (a @ b.T * 5 - 2)).sum() / len(a)


def variance_and_covariance(a: Tensor, b: Tensor) -> Tensor:
    centred = a - a.mean(0)
    covariance = centred.T @ centred / max(len(a) - 1, 1)
    spread = F.relu(1 - (a.var(0, unbiased=False) + 1e-4).sqrt()).mean()
    return F.mse_loss(a, b) + spread + covariance.square().mean()


def cross_correlation(a: Tensor, b: Tensor) -> Tensor:
    za = (a - a.mean(0)) / (a.std(0, unbiased=False) + 1e-3)
    zb = (b - b.mean(0)) / (b.std(0, unbiased=False) + 1e-3)
    return (za.T @ zb / len(a) - torch.eye(a.shape[1])).square().sum()


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


def balanced(found: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    output, balance = found
    return F.cross_entropy(output, y) + 0.01 * balance


def hardest_quarter(o: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return each.topk(len(each) // 4).values.mean()


def normalised_weights(o: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (w / w.sum() * F.cross_entropy(o, y, reduction="none")).sum()


def mean_over_pixels(outputs: list[Tensor]) -> Tensor:
    return torch.cat([output.square().flatten() for output in outputs]).mean()


def mixup() -> Made:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        order = torch.randperm(len(a))
        logits = model(0.6 * a + 0.4 * a[order])
        return 0.6 * F.cross_entropy(logits, y) + 0.4 * F.cross_entropy(logits, y[order])

    return loss, (x(), labels()), [model]


def survival(o: Tensor, times: Tensor) -> Tensor:
    risk = o[:, 0][times.argsort(descending=True)]
    return (risk.logcumsumexp(0) - risk).mean()


def rewards_less_their_mean(o: Tensor, rewards: Tensor) -> Tensor:
    return -(o.log_softmax(-1)[:, 0] * (rewards - rewards.mean())).mean()


def normalised_advantages(o: Tensor, gains: Tensor) -> Tensor:
    ratio = (o.log_softmax(-1)[:, 0] - math.log(0.25)).exp()
    gains = (gains - gains.mean()) / (gains.std(unbiased=False) + 1e-6)
    return -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()


def concordance(o: Tensor, y: Tensor) -> Tensor:
    a, b = o[:, 0], y[:, 0]
    covariance = ((a - a.mean()) * (b - b.mean())).mean()
    spread = a.var(unbiased=False) + b.var(unbiased=False)
    return 1 - 2 * covariance / (spread + (a.mean() - b.mean()) ** 2)


def numpy_noise_for_each_sample() -> Made:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(*a.shape)).float()
        return F.cross_entropy(model(a + noise), y)

    return loss, (x(), labels()), [model]


bce_with_logits = F.binary_cross_entropy_with_logits
TABLE: dict[LossKind, dict[str, Callable[[], Made]]] = {
    LossKind.MEAN: {
        "cross entropy": lambda: simple(F.cross_entropy),
        "label smoothing": lambda: simple(partial(F.cross_entropy, label_smoothing=0.1)),
        "binary with positive weight": lambda: simple(
            partial(bce_with_logits, pos_weight=torch.rand(CLASSES) * 3), y=bits()
        ),
        "focal mean": lambda: simple(focal),
        "dice of each image": lambda: simple(dice_of_each_image, y=bits()),
        "huber": lambda: simple(F.huber_loss, y=x(CLASSES)),
        "absolute error": lambda: simple(F.l1_loss, y=x(CLASSES)),
        "ctc mean": ctc,
        "given triplets": lambda: of_views(F.triplet_margin_loss, 3),
        "multi margin hinge": lambda: simple(F.multi_margin_loss),
        **{
            f"divergence {reduction}": lambda reduction=reduction: simple(
                lambda o, y: F.kl_div(o.log_softmax(-1), y, reduction=reduction),
                y=x(CLASSES).softmax(-1),
            )
            for reduction in ("batchmean", "mean")
        },
        "cosine embedding": lambda: of_views(
            F.cosine_embedding_loss, 2, torch.randint(0, 2, (N,)) * 2 - 1
        ),
        "mean of sequence means": lambda: of_tokens(mean_of_sequence_means),
        "importance weights": lambda: of_model(weighed, mlp(), labels(), torch.rand(N)),
        "variational mean": lambda: autoencoder(torch.mean),
        "diffusion": diffusion,
        "drop path": drop_path,
        "dropout": lambda: behind(nn.Dropout(0.5)),
        "batch norm": lambda: behind(nn.BatchNorm1d(8)),
        "gradient penalty": gradient_penalty,
        "mean with penalty of weights": lambda: with_penalty_of_weights("mean"),
        "mean of ragged image means": lambda: of_images(
            lambda outputs: torch.stack([output.square().mean() for output in outputs]).mean()
        ),
        "one numpy number for a batch": lambda: simple(one_numpy_number_for_a_batch),
        "loss inside the model": lambda: inside_the_model(ids(), dropout=0.3),
        # A batch decides what a trial can see.
        "ignored targets that this batch has not": lambda: simple(
            partial(F.cross_entropy, ignore_index=-100)
        ),
    },
    LossKind.SUM: {
        "cross entropy sum": lambda: simple(partial(F.cross_entropy, reduction="sum")),
        "variational sum": lambda: autoencoder(torch.sum),
    },
    LossKind.COUNTED: {"sum with count of tokens": lambda: of_tokens(counted_tokens)},
    LossKind.COUPLED: {
        "ignored targets": lambda: simple(F.cross_entropy, y=some_ignored()),
        "mean over uneven tokens": lambda: of_tokens(F.cross_entropy),
        "class weights": lambda: simple(by_classes),
        "class weights of a zero head": class_weights_of_a_zero_head,
        "focal by positives": lambda: simple(
            focal_by_positives, y=(torch.rand(N, CLASSES) > 0.7).float()
        ),
        "dice of the batch": lambda: simple(dice_of_the_batch, y=bits()),
        "root of mean square": lambda: simple(lambda o, y: F.mse_loss(o, y).sqrt(), y=x(CLASSES)),
        "hardest triplets": lambda: simple(hardest_triplets),
        "contrastive softmax": lambda: of_views(contrastive_softmax),
        "contrastive sigmoid": lambda: of_views(contrastive_sigmoid),
        "variance and covariance": lambda: of_views(variance_and_covariance),
        "cross correlation": lambda: of_views(cross_correlation),
        "balance of experts": lambda: of_model(balanced, Mixture(), labels()),
        "sum with penalty of weights": lambda: with_penalty_of_weights("sum"),
        "hardest quarter": lambda: simple(hardest_quarter),
        "normalised importance weights": lambda: of_model(
            normalised_weights, mlp(), labels(), torch.rand(N)
        ),
        "mean over pixels of ragged images": lambda: of_images(mean_over_pixels),
        "batch mean taken by hand": lambda: simple(lambda o, y: F.cross_entropy(o - o.mean(0), y)),
        "mixup": mixup,
        "survival": lambda: simple(survival, 1, torch.rand(N)),
        "rewards less their mean": lambda: simple(rewards_less_their_mean, y=torch.rand(N)),
        "normalised advantages": lambda: simple(normalised_advantages, y=torch.randn(N)),
        "concordance": lambda: simple(concordance, 1, x(1)),
        "padded loss inside the model": lambda: inside_the_model(padded()),
    },
    LossKind.NOT_JUDGED: {"numpy noise for each sample": numpy_noise_for_each_sample},
}
CASES = [Case(name, kind, make) for kind, cases in TABLE.items() for name, make in cases.items()]
