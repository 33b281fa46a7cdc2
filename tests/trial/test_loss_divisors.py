"""What a loss divides by is told by its graph, and compared between the parts of a batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.trial.loss_divisors import LossPart, divisors_of, doubt, objection

ROWS, LENGTH, CLASSES = 6, 4, 5
Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def part(loss: Loss, number: int, rows: int = ROWS) -> LossPart:
    """Return the divisors of a loss of samples of which each part has others."""
    generator = torch.Generator().manual_seed(number)
    scores = nn.Linear(3, CLASSES)(torch.randn(rows, LENGTH, 3, generator=generator))
    tokens = torch.randint(0, CLASSES, (rows, LENGTH), generator=generator)
    tokens[0, number:] = -100
    outputs = {scores.grad_fn}
    value = loss(scores, tokens)
    return LossPart(f"rank {number}", rows, divisors_of(value, rows, outputs))


def masked(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss for each token, and 1 where it counts."""
    mask = (tokens >= 0).to(scores.dtype)
    return scores.square().mean(-1), mask


def token_mean(scores: Tensor, tokens: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten(), **options)


MEANS: dict[str, Loss] = {
    "beside outputs that all take part": lambda s, t: s.square().mean() + (s * 0).sum(),
    "beside their sum, times 0": lambda s, t: s.square().mean() + 0.0 * s.sum(),
    "mean squares": lambda s, t: F.mse_loss(s, torch.zeros_like(s)),
    "absolute values": lambda s, t: F.l1_loss(s, torch.zeros_like(s)),
    "every token": lambda s, t: token_mean(s, t.clamp(min=0)),
    "smoothed labels": lambda s, t: token_mean(s, t.clamp(min=0), label_smoothing=0.1),
    "probabilities": lambda s, t: F.cross_entropy(s[:, 0], s[:, 0].detach().softmax(1)),
    "a mean for each sample": lambda s, t: (
        (masked(s, t)[0] * masked(s, t)[1]).sum(1) / masked(s, t)[1].sum(1)
    ).mean(),
    "a sum by the number of samples": lambda s, t: s.square().sum() / len(s),
    "a sum by the number of elements": lambda s, t: s[:, 0, :2].square().sum() / (2 * len(s)),
    "sums of two views": lambda s, t: (s[:, 0, 0].sum() + s[:, 1, 0].exp().sum()) / (2 * len(s)),
    "half of the mean of sums": lambda s, t: s.square().sum((1, 2)).mean() / 2,
    "a sum by a factor": lambda s, t: s.square().sum() * (1 / len(s)),
    "weighted terms": lambda s, t: 10 * s.square().mean() + 0.5 * s.abs().sum() / len(s),
    "mean of one dimension, sum of the other": lambda s, t: s.square().mean(0).sum(),
    "batchmean": lambda s, t: F.kl_div(
        s[:, 0].log_softmax(1), s[:, 1].detach().softmax(1), reduction="batchmean"
    ),
    "a number for each sample": lambda s, t: torch.stack(
        [one.square().mean() * own[0] for one, own in zip(s, t, strict=True)]
    ).mean(),
    "a number for each sample, added up": lambda s, t: (
        sum(one.square().mean() * own[0] for one, own in zip(s, t, strict=True)) / len(s)
    ),
    "weighed by hand": lambda s, t: (
        F.mse_loss(s[..., 0], torch.zeros(s.shape[:2]), reduction="none").mean(1)
        * torch.ones(len(s))
    ).mean(),
    "rows of unit length": lambda s, t: F.normalize(s[:, 0, 0], dim=0, eps=9.0).square().mean(),
    "logits": lambda s, t: F.binary_cross_entropy_with_logits(s, torch.ones_like(s)),
}
COUNTS: dict[str, Loss] = {
    "ignored tokens": token_mean,
    "ignored tokens, smoothed": lambda s, t: token_mean(s, t, label_smoothing=0.1),
    "ignored tokens in images": lambda s, t: F.cross_entropy(s.transpose(1, 2), t),
    "class weights": lambda s, t: token_mean(s, t.clamp(min=0), weight=WEIGHT),
    "a mask": lambda s, t: (masked(s, t)[0] * masked(s, t)[1]).sum() / masked(s, t)[1].sum(),
    "a mask of samples": lambda s, t: (
        (s[:, 0, 0] * (t[:, 0] > 1)).sum() / (t[:, 0] > 1).sum().clamp(min=1)
    ),
    "a mask's number": lambda s, t: s.square().sum() / masked(s, t)[1].sum().item(),
    "a choice": lambda s, t: masked(s, t)[0][t >= 0].mean(),
    "a term of several": lambda s, t: s.square().mean() + 0.1 * token_mean(s, t),
    "divided inside": lambda s, t: (masked(s, t)[0] / masked(s, t)[1].sum()).sum(),
    "a product of vectors": lambda s, t: (
        torch.dot(*(each.flatten() for each in masked(s, t))) / masked(s, t)[1].sum()
    ),
    "a sum in Einstein's notation": lambda s, t: (
        torch.einsum("ij,ij->", *masked(s, t)) / masked(s, t)[1].sum()
    ),
    "numbers that are not NaN": lambda s, t: s[..., 0].masked_fill(t < 0, torch.nan).nanmean(),
    "the last of running sums": lambda s, t: (
        (masked(s, t)[0] * masked(s, t)[1]).flatten().cumsum(0)[-1] / masked(s, t)[1].sum()
    ),
    "samples of each class": lambda s, t: (
        torch.zeros(2).index_add(0, (t[:, 0] > 1).long(), s[:, 0, 0])
        / torch.bincount((t[:, 0] > 1).long(), minlength=2).clamp(min=1)
    ).mean(),
}
SUMS: dict[str, Loss] = {
    "squares": lambda s, t: s.square().sum(),
    "cross entropy": lambda s, t: token_mean(s, t, reduction="sum"),
    "a variational bound": lambda s, t: -0.5 * (1 + s - s.exp()).sum(),
    "by the samples of the whole batch": lambda s, t: s.square().sum() / (2 * ROWS),
    "of losses of torch, by the samples of the whole batch": lambda s, t: (
        token_mean(s, t, reduction="sum") / (2 * ROWS)
    ),
    "of losses of torch": lambda s, t: F.mse_loss(s, torch.zeros_like(s), reduction="sum"),
    "of a mean for each sample": lambda s, t: s.repeat(1, 1, 4).square().mean((1, 2)).sum(),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_is_right_for_parts_of_any_size(name: str) -> None:
    assert objection([part(MEANS[name], 1), part(MEANS[name], 2)]) == ""
    assert objection([part(MEANS[name], 1), part(MEANS[name], 2, rows=5)]) == ""


@pytest.mark.parametrize("name", COUNTS)
def test_a_mean_over_what_each_part_counts_is_refused_with_the_counts(name: str) -> None:
    text = objection([part(COUNTS[name], 1), part(COUNTS[name], 2)])
    assert "divides by what each rank has counted" in text
    assert "rank 1 by" in text
    assert "for 6 samples" in text
    assert "shoal.counted" in text


def test_the_counts_of_a_refusal_are_those_of_the_parts() -> None:
    text = objection([part(token_mean, 1), part(token_mean, 2)])
    assert "rank 1 by 21 for 6 samples, rank 2 by 22 for 6 samples" in text


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_is_refused(name: str) -> None:
    text = objection([part(SUMS[name], 1), part(SUMS[name], 2)])
    assert "a sum over samples" in text
    assert "loss / len(x)" in text


@pytest.mark.parametrize(
    "name", ["squares", "cross entropy", "of losses of torch", "of a mean for each sample"]
)
def test_a_sum_of_one_sample_on_each_rank_is_refused(name: str) -> None:
    assert "a sum over samples" in objection([part(SUMS[name], 1, 1), part(SUMS[name], 2, 1)])


@pytest.mark.parametrize(
    "name",
    ["mean squares", "every token", "a mean for each sample", "a sum by the number of samples"],
)
def test_a_mean_over_one_sample_on_each_rank_is_right(name: str) -> None:
    assert objection([part(MEANS[name], 1, 1), part(MEANS[name], 2, 1)]) == ""


def test_a_mean_over_samples_behind_time_is_no_mean_for_each_sample() -> None:
    def time_first(scores: Tensor, _: Tensor) -> Tensor:
        return scores.repeat(1, 3, 1).transpose(0, 1).mean(1).sum()  # 12 steps of 6 samples

    assert objection([part(time_first, 1), part(time_first, 2)]) == ""


def test_a_penalty_on_weights_is_no_sum_over_samples() -> None:
    weight = nn.Parameter(torch.randn(ROWS, 3))

    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        return scores.square().mean() + 0.01 * weight.square().sum()

    assert objection([part(loss, 1), part(loss, 2)]) == ""


def test_a_factor_that_each_part_has_of_its_own_is_refused_and_a_common_one_is_not() -> None:
    def loss(scores: Tensor, tokens: Tensor, factor: float) -> Tensor:
        return scores.square().mean() - factor * scores.abs().mean()

    first, second, third = (part(partial(loss, factor=f), n) for n, f in enumerate((0.2, 0.2, 0.3)))
    assert objection([first, second]) == ""
    text = objection([second, third])
    assert "multiplies a term (mean) by another number: rank 1 by 0.2 for 6 samples" in text
    assert "the loss that run.backward returns" in text


def test_a_mean_that_is_weighted_by_the_share_of_its_part_is_refused_where_shares_differ() -> None:
    def loss(scores: Tensor, tokens: Tensor, weight: float) -> Tensor:
        return scores.square().mean() * weight

    four, three = (part(partial(loss, weight=n / 7), 1, n) for n in (4, 3))
    assert "multiplied by the samples of this rank and divided by those of all, 7" in objection(
        [four, three]
    )
    halves = [part(partial(loss, weight=0.5), 1, 3)] * 2
    assert objection(halves) == ""


def test_a_mean_of_one_sample_may_be_divided_by_as_many_batches_as_there_are_parts() -> None:
    def divided(scores: Tensor, tokens: Tensor) -> Tensor:
        return scores.square().mean() / 2

    def weighted(scores: Tensor, tokens: Tensor) -> Tensor:
        return scores.square().mean() * len(scores) / 2

    assert objection([part(divided, 1, 1), part(divided, 2, 1)]) == ""
    assert "divided by those of all, 2" in objection([part(weighted, 1, 1), part(weighted, 2, 1)])


BENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flooding": lambda mean, level: (mean - level).abs() + level,
    "free bits by clamp": lambda mean, level: mean.clamp(min=level.item()),
    "free bits by maximum": lambda mean, level: torch.max(mean, level),
    "a hinge": lambda mean, level: F.relu(mean - level),
    "a bound": lambda mean, level: torch.where(mean < level, mean, level),
}


@pytest.mark.parametrize("name", BENDS)
def test_a_bend_between_the_means_of_parts_is_refused_and_one_beside_them_is_not(name: str) -> None:
    bend = BENDS[name]

    def loss(scores: Tensor, tokens: Tensor, level: float) -> Tensor:
        # One part has a mean of 2, and the other one, where no token is ignored, of 1.
        mean = (scores - scores.detach() + 1 + (tokens < 0).any()).mean()
        return bend(mean, torch.tensor(level))

    def parts(level: float) -> list[LossPart]:
        return [part(partial(loss, level=level), number) for number in (1, LENGTH)]

    text = objection(parts(1.5))
    assert "multiplies a term (mean) by another number: rank 1 by" in text
    assert "bend that of all samples, run.gather(losses).mean()" in text
    assert objection(parts(-1.0)) == objection(parts(3.0)) == ""


def test_a_bend_among_as_many_terms_of_other_kinds_as_samples_is_refused() -> None:
    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        mean = (scores - scores.detach() + 1 + (tokens < 0).any()).mean()
        return (mean - 1.5).abs() + F.mse_loss(scores, torch.zeros_like(scores))

    text = objection([part(loss, number, rows=2) for number in (1, LENGTH)])
    assert "multiplies a term (mean) by another number: rank 1 by" in text


def test_a_bend_of_means_over_samples_is_refused_where_parts_lie_on_other_sides_of_it() -> None:
    def loss(scores: Tensor, tokens: Tensor, level: float) -> Tensor:
        return scores.square().mean(dim=(0, 1)).clamp(min=level).sum()

    def parts(level: float) -> list[LossPart]:
        return [part(partial(loss, level=level), number) for number in (1, 2)]

    assert objection(parts(0.0)) == ""
    assert "multiplies a term (sum) by another number" in objection(parts(0.4))
    flat: Loss = lambda scores, _: scores.flatten().clamp(min=0.1).mean()  # noqa: E731
    assert objection([part(flat, number) for number in (1, 2)]) == ""


CLASS_WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "of a cross entropy for each token": lambda s, t, w: token_mean(
        s, t.clamp(min=0), weight=w, reduction="none"
    ).mean(),
    "of positive answers": lambda s, t, w: F.binary_cross_entropy_with_logits(
        s, (s > 0).to(s.dtype), pos_weight=w
    ),
    "of positive answers, one number": lambda s, t, w: F.binary_cross_entropy_with_logits(
        s[:, 0, 0], (s[:, 0, 0] > 0).to(s.dtype), pos_weight=w[1]
    ),
    "of positive answers, one entry": lambda s, t, w: F.binary_cross_entropy_with_logits(
        s[:, 0, 0], (s[:, 0, 0] > 0).to(s.dtype), pos_weight=w[1:2]
    ),
    "of answers": lambda s, t, w: F.binary_cross_entropy_with_logits(
        s, torch.ones_like(s), weight=w
    ),
}


@pytest.mark.parametrize("name", CLASS_WEIGHTS)
def test_weights_of_classes_that_parts_have_of_their_own_are_refused(name: str) -> None:
    def loss(scores: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
        return CLASS_WEIGHTS[name](scores, tokens, weight)

    own = [part(partial(loss, weight=weight), n) for n, weight in enumerate((WEIGHT, 1 / WEIGHT))]
    assert "multiplies a term" in objection(own)
    for rows in (ROWS, ROWS - 1, 1):
        common = [
            part(partial(loss, weight=WEIGHT), 0),
            part(partial(loss, weight=WEIGHT), 1, rows),
        ]
        assert objection(common) == ""


def test_weights_of_samples_are_no_weights_of_classes() -> None:
    def loss(scores: Tensor, tokens: Tensor, low: float) -> Tensor:
        first = scores[:, 0, 0]
        weight = torch.linspace(low, 2.0, len(first))
        return F.binary_cross_entropy_with_logits(first, torch.ones_like(first), weight)

    assert objection([part(partial(loss, low=low), n) for n, low in enumerate((0.5, 1.0))]) == ""


def test_parts_without_samples_are_not_compared() -> None:
    empty = LossPart("rank 3", 0, [])
    assert objection([part(MEANS["mean squares"], 1), empty]) == ""
    assert objection([empty]) == ""


def test_losses_of_other_forms_are_not_compared() -> None:
    assert objection([part(token_mean, 1), part(MEANS["mean squares"], 2)]) == ""


class MaskedMean(torch.autograd.Function):
    """A function of a script that divides inside."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return (values * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return gradient * mask / mask.sum(), None


def test_what_a_graph_does_not_tell_is_a_doubt() -> None:
    def own(s: Tensor, t: Tensor) -> Tensor:
        return MaskedMean.apply(*masked(s, t)) * 2

    def chosen(s: Tensor, t: Tensor) -> Tensor:
        return torch.stack([one.square().mean() for one, y in zip(s, t, strict=True) if y[1] >= 0])

    unseen = doubt([part(own, 1), part(own, 2)])
    assert unseen == "it does not look into MaskedMean"

    def of_groups(s: Tensor, t: Tensor) -> Tensor:
        groups = t[:, 0].clamp(min=0)
        return torch.zeros(CLASSES).scatter_reduce(0, groups, s[:, 0, 0], "mean").mean()

    unseen = doubt([part(of_groups, 1), part(of_groups, 2)])
    assert unseen == "it does not look into ScatterReduce"
    parts = [part(lambda s, t: chosen(s, t).mean(), number) for number in (1, 2)]
    assert doubt(parts) == "ranks add up other terms, rank 1 of 5, rank 2 of 6"


def test_a_loss_of_chosen_samples_or_of_none_is_a_doubt() -> None:
    def of_chosen(s: Tensor, t: Tensor) -> Tensor:
        chosen = t[:, 1] < 0  # only in part 1
        return s[chosen].square().mean() if chosen.any() else s.sum() * 0

    parts = [part(of_chosen, number) for number in (1, 2)]
    assert doubt(parts) == "ranks add up other terms, rank 1 mean, rank 2 sum"


def test_means_and_terms_of_each_sample_are_no_doubt() -> None:
    for loss in MEANS.values():
        assert doubt([part(loss, 1), part(loss, 2), part(loss, 2, rows=5)]) == ""


def test_a_loss_of_very_many_terms_ends() -> None:
    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        total = scores.square().mean()
        for _ in range(40):  # 2 ** 40 ways
            total = total + total
        return total

    assert objection([part(loss, 1), part(loss, 2)]) == ""


@pytest.mark.parametrize(("penalty", "is_refused"), [(False, True), (True, False)])
def test_a_sum_over_samples_is_seen_without_outputs_of_a_module(
    penalty: bool, is_refused: bool
) -> None:
    weight = torch.ones(3, 2, requires_grad=True)

    def seen(rank: int) -> LossPart:
        scores = (torch.ones(4, 3) @ weight).square()
        loss = scores.mean() + weight.square().sum() if penalty else scores.sum()
        return LossPart(f"rank {rank}", 4, divisors_of(loss, 4, set()))

    assert ("a sum over samples" in objection([seen(0), seen(1)])) == is_refused
