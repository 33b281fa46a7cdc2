import math

import pytest
import torch
import torch.nn.functional as F

from shoal.train.task import Task

LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
TARGET = torch.tensor([0, 2, 1])


def test_sums_of_a_batch_become_means_and_percentages() -> None:
    task = Task("classification", num_classes=3, topk=2)
    sums = {name: value.item() for name, value in task.measures(LOGITS, TARGET).items()}
    report = task.report(sums | {"samples": 3.0})
    assert report["top1"] == pytest.approx(100 / 3)
    assert report["top2"] == 100.0
    assert report["samples"] == 3
    assert report["loss"] == pytest.approx(F.cross_entropy(LOGITS, TARGET).item())


def test_the_second_accuracy_is_never_wider_than_the_classes() -> None:
    assert (
        Task("classification", num_classes=3, topk=5).report(
            {"loss": 1, "top1": 1, "topk": 2, "predictions": 2, "samples": 2}
        )["top3"]
        == 100
    )


def test_a_text_is_measured_token_by_token() -> None:
    task = Task("language", num_classes=3, topk=2)
    sums = {
        n: v.item()
        for n, v in task.measures(LOGITS[None].repeat(2, 1, 1), TARGET[None].repeat(2, 1)).items()
    }
    report = task.report(sums | {"samples": 2.0})
    assert sums["predictions"] == 6
    assert report["perplexity"] == pytest.approx(math.exp(F.cross_entropy(LOGITS, TARGET).item()))


def test_hits_of_mixed_samples_count_their_larger_part() -> None:
    soft = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.6, 0.4], [0.9, 0.0, 0.1]])
    assert Task("classification", 3).num_correct(LOGITS, soft).tolist() == [2, 3]


def test_smoothing_is_for_training_alone() -> None:
    task = Task("classification", 3, label_smoothing=0.2)
    assert task.loss(LOGITS, TARGET) == F.cross_entropy(LOGITS, TARGET, label_smoothing=0.2)
    assert task.measures(LOGITS, TARGET)["loss"].item() == pytest.approx(
        3 * F.cross_entropy(LOGITS, TARGET).item()
    )


def test_a_diverged_text_has_infinite_perplexity_instead_of_an_error() -> None:
    assert Task("language", 3).training_report(1e6, 0, 1)["perplexity"] == math.inf


def test_of_two_equal_accuracies_the_one_with_the_lower_loss_is_better() -> None:
    task = Task("classification", 3)
    assert task.score({"top1": 99.17, "loss": 0.147}) > task.score({"top1": 99.17, "loss": 0.195})
    assert task.score({"top1": 99.44, "loss": 0.195}) > task.score({"top1": 99.17, "loss": 0.147})
    assert task.score({"top1": 99.17, "loss": 0.195}) > task.score(
        {"top1": 99.17, "loss": math.nan}
    )


def test_any_number_is_better_than_a_loss_that_is_none() -> None:
    task = Task("language", 3)
    assert task.score({"loss": 1e6}) > task.score({"loss": math.nan})
    assert not task.score({"loss": math.nan}) > task.score({"loss": math.nan})
    assert task.score({"loss": 2.0}) > task.score({"loss": 3.0})
