"""Every sample counts once, and the sums are the same to the last bit, whatever the number of
ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
import torch
from tiny_jobs import EVERYTHING, tiny
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.models.gpt import GPT
from shoal.models.residual_cnn import ResidualCNN
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.train.evaluation import evaluate_run
from shoal.train.task import Task
from tests.harness.in_turn import in_turn

RANKS = (1, 3, 4)
# The last three have fewer batches than four ranks: three, two and one.
SAMPLES = (10_001, 1_797, 450, 201, 3)
Report = dict[str, float | int]


def images(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    pixels = torch.randn(samples, 1, 8, 8, generator=generator)
    return TensorDataset(pixels, torch.randint(10, (samples,), generator=generator))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return ResidualCNN(num_classes=10, input_shape=(1, 8, 8), widths=(8, 8), norm="batch")


def evaluates_images() -> list[Report]:
    """On each number of samples. Every rank has buffers of its own, as after training; rank 0's
    count.
    """
    run, model, task = shoal.init(announce=str), cnn(), Task("classification", 10)
    norm = model.stages[0][0].norm1  # type: ignore[index, union-attr]
    norm.running_mean.fill_(0.01 * (run.rank + 1))
    loaders = [DataLoader(images(samples), batch_size=200) for samples in SAMPLES]
    return [
        task.report(run.evaluate(supervised(task.measures, model), loader, model))
        for loader in loaders
    ]


def evaluates_text() -> Report:
    run, task = shoal.init(announce=str), Task("language", 20)
    torch.manual_seed(0)
    model = GPT(num_classes=20, input_shape=(16,), layers=1, width=16, heads=2, dropout=0.5)
    text = torch.randint(20, (1_797, 17))
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=200)
    return task.report(run.evaluate(supervised(task.measures, model), loader, model))


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [evaluates_images, evaluates_text])
def test_reports_are_identical_on_any_number_of_ranks(evaluates: Any) -> None:
    reports = [report for ranks in RANKS for report in world.run(ranks, evaluates)]
    assert all(report == reports[0] for report in reports)


def test_the_numbers_are_those_of_a_plain_loop() -> None:
    model = cnn().eval()
    model.stages[0][0].norm1.running_mean.fill_(0.01)  # type: ignore[index, union-attr]
    for report, samples in zip(evaluates_images(), SAMPLES, strict=True):
        pixels, labels = images(samples).tensors
        with torch.no_grad():
            logits = model(pixels)
        order = logits.argsort(dim=1, descending=True)
        assert report["top1"] == 100 * (order[:, 0] == labels).sum().item() / samples
        assert report["top5"] == 100 * (order[:, :5] == labels[:, None]).sum().item() / samples
        expected = nn.functional.cross_entropy(logits.double(), labels).item()
        assert report["loss"] == pytest.approx(expected, rel=1e-6)
        assert report["samples"] == samples


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A run that was trained for four steps on two ranks, and its own last evaluation."""
    dummy = {"data.name": "dummy", "data.shape": [1, 8, 8], "data.samples": 1_797}
    directory = tmp_path_factory.mktemp("finished") / "run"
    world.run(
        2,
        tiny_jobs.trains,
        tiny(directory, EVERYTHING, dummy, train__max_steps=4, evaluation__batch_size=200),
    )
    *_, last = tiny_jobs.metrics(directory)
    return directory, {name: last[name] for name in ("loss", "top1", "top5", "samples", "step")}


def test_a_run_evaluated_again_is_worth_the_same_on_any_number_of_ranks(
    finished: tuple[Path, Report],
) -> None:
    directory, expected = finished
    for ranks in RANKS:
        assert world.run(ranks, evaluate_run, directory, "latest") == [
            (rank, expected) for rank in range(ranks)
        ]


def test_a_run_is_evaluated_under_another_strategy_than_it_was_trained_with(
    finished: tuple[Path, Report],
) -> None:
    directory, expected = finished
    calls = [(directory, 4, strategy) for strategy in ("zero3", "pipeline=2", "server=1")]
    for results in world.run(2, in_turn, evaluate_run, *calls):
        for _, found in results:
            assert found == pytest.approx(expected, rel=1e-6)


def test_a_run_is_divided_for_an_evaluation_whatever_its_optimizer(tmp_path: Path) -> None:
    more = {"optimizer.weight_decay": 0.1, "optimizer.decay_norm_and_bias": False}
    job = tiny(tmp_path / "run", EVERYTHING, more, optimizer__name="Adafactor")
    world.run(1, tiny_jobs.trains, job)
    loss = tiny_jobs.metrics(tmp_path / "run")[-1]["loss"]
    calls = [(tmp_path / "run", "latest", strategy) for strategy in ("zero3", "server=1")]
    for results in world.run(2, in_turn, evaluate_run, *calls):
        assert [found["loss"] for _, found in results] == pytest.approx([loss] * 2, rel=1e-6)
