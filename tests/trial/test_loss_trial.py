"""The trial of a loss: what it says, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from known_losses import N, labels, mlp, x
from torch import Tensor, nn

from shoal.trial import LossKind, end_trial, try_loss
from shoal.trial.batch_rows import BatchNews
from shoal.trial.compare_parts import LossOnRows


def judged(compute_loss: Callable[..., Any], *args: Any, models: list[nn.Module]) -> Any:
    return try_loss(compute_loss, args, {}, len(args[0]), models)


def test_padding_in_few_samples_of_a_large_batch_is_among_the_tried_rows() -> None:
    model, targets = mlp(), torch.randint(0, 4, (300,))
    targets[-3:] = -100
    verdict = judged(
        lambda a, y: F.cross_entropy(model(a), y), torch.randn(300, 6), targets, models=[model]
    )
    assert verdict.kind is LossKind.COUPLED


def test_a_mean_is_tried_in_two_passes_over_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, measured, model = list[int](), LossOnRows._measured, mlp()

    def counting(self: LossOnRows, terms: Any, rows: Tensor, share: float) -> Any:
        sizes.append(len(rows))  # the trial puts back what the loss itself would count
        return measured(self, terms, rows, share)

    monkeypatch.setattr(LossOnRows, "_measured", counting)
    assert judged(lambda a: model(a).mean(), x(), models=[model]).kind is LossKind.MEAN
    assert sum(sizes) == 2 * N


def test_a_new_label_is_news_only_where_it_may_be_padding() -> None:
    news = BatchNews()
    seen = [[4, 5, 6, 4], [4, 5, 9, 4], [4, 9, 5, 9], [3, 4, 5, 5], [-100, 4, 5, 6]]
    is_news = [news.found_in([torch.tensor(each)], len(each)) for each in seen]
    assert is_news == [True, False, True, False, True]


def test_an_objection_is_told_with_its_cures() -> None:
    model, weight = mlp(), torch.tensor([0.1, 1.0, 2.0, 5.0])
    text = judged(
        lambda a, y: F.cross_entropy(model(a), y, weight=weight), x(), labels(), models=[model]
    ).text()
    assert "of these 12 samples it gives gradients that differ by" in text
    for cure in ("shoal.counted(sum, count)", "run.gather(tensor)", 'reduction="ranks"'):
        assert cure in text


def test_a_function_that_fails_on_fewer_samples_is_told_with_its_line() -> None:
    model, pairs = mlp(), torch.arange(N).roll(1)
    verdict = judged(lambda a: (model(a) - model(a)[pairs]).square().mean(), x(), models=[model])
    assert verdict.kind is LossKind.FAILS_ON_PARTS
    assert "IndexError" in verdict.text()
    assert "at test_loss_trial.py:" in verdict.text()


def test_a_loss_that_needs_two_samples_is_told_apart_from_a_coupled_one() -> None:
    model = mlp()

    def loss(a: Tensor) -> Tensor:
        if len(a) < 2:
            raise ValueError("one sample")
        return model(a).square().mean()

    verdict = judged(loss, x(), models=[model])
    assert verdict.kind is LossKind.NEEDS_TWO_ROWS
    assert "at least 2 samples on each rank" in verdict.text()


def test_dropout_over_two_views_in_one_call_is_no_coupling() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def loss(a: Tensor, b: Tensor) -> Tensor:
        first, second = model(torch.cat([a, b])).chunk(2)
        return F.mse_loss(first, second)

    assert judged(loss, x(), x(), models=[model]).kind is LossKind.MEAN


def test_a_permutation_of_whole_samples_is_no_coupling() -> None:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        order = torch.randperm(len(a))
        return F.cross_entropy(model(a[order]), y[order])

    assert judged(loss, x(), labels(), models=[model]).kind is LossKind.MEAN


def test_draws_that_have_no_rows_are_no_reason_to_refuse() -> None:
    model = mlp()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        noise = torch.zeros(len(a), 4)
        chosen = a[:, 0] > 0
        noise[chosen] = torch.randn(int(chosen.sum()), 4)
        return F.cross_entropy(model(a) + noise, y)

    # Were all of them in one half, that half would draw what the whole batch draws.
    samples = x()
    samples[:, 0] = torch.tensor([1.0, -1.0]).repeat(N // 2)
    verdict = judged(loss, samples, labels(), models=[model])
    assert verdict.kind is LossKind.NOT_JUDGED
    assert "have no rows of their own" in verdict.text()


def test_an_iterator_that_the_function_reads_is_left_alone() -> None:
    model, more = mlp(), iter([x(), x()])
    verdict = judged(lambda a: (model(a) + model(next(more))).mean(), x(), models=[model])
    assert verdict.kind is LossKind.NOT_JUDGED
    assert len(list(more)) == 2


def test_a_batch_that_cannot_be_cut_is_not_tried() -> None:
    class Graph:
        nodes = x()

    model = mlp()
    verdict = try_loss(lambda graph: model(graph.nodes).mean(), (Graph(),), {}, N, [model])
    assert verdict.kind is LossKind.NOT_JUDGED
    assert "a Graph, which cannot be cut into parts" in verdict.text()


def test_a_function_that_gathers_ends_the_trial_in_silence() -> None:
    model = mlp()

    def loss(a: Tensor) -> Tensor:
        end_trial()
        output = model(a)
        return (output - output.mean(0)).square().mean()

    assert not judged(loss, x(), models=[model]).is_worth_a_note
    end_trial()


def test_a_collective_in_the_function_ends_the_trial() -> None:
    model = mlp()

    def loss(a: Tensor) -> Tensor:
        total = model(a).mean()
        torch.ops._c10d_functional.all_reduce(total.detach(), "sum", "0")
        return total

    verdict = judged(loss, x(), models=[model])
    assert verdict.kind is LossKind.NOT_JUDGED
    assert "communication between ranks" in verdict.text()


def test_rows_that_the_loop_has_sorted_stay_in_order() -> None:
    model = nn.GRU(3, 4, batch_first=True)
    lengths = torch.tensor([5, 5, 4, 3, 3, 2, 1])

    def compute_loss(features: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(features, lengths, batch_first=True)
        return model(packed)[1].pow(2).mean()

    verdict = judged(compute_loss, torch.randn(7, 5, 3), lengths, models=[model])
    assert verdict.kind is LossKind.MEAN


def test_a_running_mean_of_a_rank_s_own_losses_is_told() -> None:
    model, mean = mlp(), [torch.ones(())]

    def loss(a: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(model(a), y)
        relative = value / mean[0]
        mean[0] = 0.5 * mean[0] + 0.5 * value.detach()
        return relative

    assert (
        "what it has kept of earlier samples" in judged(loss, x(), labels(), models=[model]).text()
    )


class CenterLoss(nn.Module):
    """A pull towards the running means of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(4, 4))

    def forward(self, features: Tensor, y: Tensor) -> Tensor:
        value = (features - self.centers[y]).square().mean()
        for label, feature in zip(y.tolist(), features.detach(), strict=True):
            self.centers[label].lerp_(feature, 0.5)
        return value


def test_class_centers_of_a_rank_s_own_samples_are_told() -> None:
    model, centers = mlp(), CenterLoss()
    verdict = judged(lambda a, y: centers(model(a), y), x(), labels(), models=[model])
    assert verdict.kind is LossKind.MEAN
    assert verdict.memory > 0.01


def test_what_a_loss_counts_lowers_and_writes_down_is_no_memory_of_samples() -> None:
    model, teacher, meter, state = mlp(), mlp(), [], {"calls": 0, "temperature": 4.0}

    def loss(a: Tensor, y: Tensor) -> Tensor:
        state["calls"] += 1
        state["temperature"] *= 0.9
        with torch.no_grad():
            for kept, own in zip(teacher.parameters(), model.parameters(), strict=True):
                kept.lerp_(own, 0.1)
        value = F.cross_entropy(model(a) / state["temperature"], y)
        value = value + F.mse_loss(model(a), teacher(a))
        meter.append(value.item())
        return value

    verdict = judged(loss, x(), labels(), models=[model])
    assert verdict.kind is LossKind.MEAN
    assert verdict.memory == 0
    assert not meter


def test_a_state_of_each_row_is_no_memory_of_other_samples() -> None:
    model, hidden = mlp(), [torch.zeros(N, 4)]

    def loss(a: Tensor, y: Tensor) -> Tensor:
        if len(hidden[0]) != len(a):
            hidden[0] = torch.zeros(len(a), 4)
        hidden[0] = torch.tanh(model(a) + hidden[0].detach())
        return F.cross_entropy(hidden[0], y)

    assert judged(loss, x(), labels(), models=[model]).memory == 0
