from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
import torch
from test_resume import DOUBLE, stop
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, metrics, tiny
from torch import nn
from torch.optim import lr_scheduler

from shoal.config.job import Job, OptimizerConfig, ScheduleConfig, TrainConfig
from shoal.errors import ConfigError
from shoal.testing import world
from shoal.train import job_precheck
from shoal.train.optimizer import RateSchedule, set_learning_rate


def schedule(epochs: int = 3, steps: int = 4, **settings: Any) -> RateSchedule:
    """The rates of epochs of so many steps."""
    train, rate = TrainConfig(epochs=epochs), OptimizerConfig(lr=0.3)
    job = Job(schedule=ScheduleConfig(**settings), train=train, optimizer=rate)
    return RateSchedule(job, [steps] * epochs)


def test_warm_up_is_linear_from_its_factor_to_one() -> None:
    rates = schedule(name="constant", warmup_epochs=2, warmup_factor=0.1)
    assert [rates.factor(epochs, 0) for epochs in (0, 1, 2, 3)] == pytest.approx(
        [0.1, 0.55, 1.0, 1.0]
    )


def test_warm_up_may_be_counted_in_steps() -> None:
    rates = schedule(name="constant", warmup_steps=4, warmup_factor=0.2)
    factors = [rates.factor(0.0, step) for step in range(6)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_falls_from_one_to_its_final_factor() -> None:
    rates = schedule(name="cosine", final_factor=0.1)
    assert [rates.factor(1, step) for step in (0, 6, 12)] == pytest.approx([1.0, 0.55, 0.1])


def test_steps_multiply_at_their_milestones() -> None:
    rates = schedule(name="step", milestones=(2, 4), gamma=0.1)
    assert [rates.factor(epochs, 6) for epochs in (0, 1.99, 2, 4.5)] == pytest.approx(
        [1, 1, 0.1, 0.01]
    )


def test_warm_up_multiplies_the_shape() -> None:
    rates = schedule(name="cosine", warmup_epochs=1, warmup_factor=0.0)
    assert rates.factor(0.5, 6) == pytest.approx(0.25)


CLASSES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {},
    "LinearLR": {"total_iters": 3},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 0.01},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 12, "cycle_momentum": False},
    "PolynomialLR": {"total_iters": 5, "power": 0.5},
}


def test_every_class_of_torch_is_taken_or_refused() -> None:
    base = {"LRScheduler"}
    assert {*lr_scheduler.__all__} == {*CLASSES, *job_precheck.REFUSED_SCHEDULES} | base


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", CLASSES)
def test_rates_are_those_of_torchs_scheduler(name: str, interval: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.3)
    theirs = getattr(lr_scheduler, name)(optimizer, **CLASSES[name])
    ours = schedule(name=name, options=CLASSES[name], interval=interval)
    for step in range(12):
        assert 0.3 * ours.factor(step / 4, step) == pytest.approx(theirs.get_last_lr()[0], 1e-14)
        optimizer.step()
        if interval == "step" or step % 4 == 3:
            theirs.step()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 9}, "for step 10 of 12: Tried to step 10"),
        ("StepLR", {"step_size": 0}, "for step 1 of 12: "),
        ("ExponentialLR", {"gamma": -1.0}, r"for step 2 of 12: the rate is -0\.3"),
    ],
)
def test_rates_that_a_class_does_not_have_are_refused_before_the_first_step(
    name: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"schedule\.options: {name} has no rate {text}"):
        schedule(name=name, options=options, interval="step")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("StepLr", {}, "'StepLr' is not in torch.optim.lr_scheduler; did you mean 'StepLR'"),
        ("LRScheduler", {}, "is not in torch.optim.lr_scheduler; "),
        ("ReduceLROnPlateau", {}, "ReduceLROnPlateau follows a measured value"),
        ("SequentialLR", {}, "SequentialLR takes functions or other schedulers"),
        ("StepLR", {}, "schedule.options.step_size: StepLR needs this option"),
        ("StepLR", {"step_size": 1, "step": 2}, "no such option; did you mean 'step_size'?"),
        ("StepLR", {"step_size": 1, "last_epoch": 2}, "no such option; known: gamma, step_size"),
        ("CyclicLR", {"base_lr": 1, "max_lr": 2}, "CyclicLR would change the momentum too"),
    ],
)
def test_what_a_job_cannot_have_is_refused_before_the_start(
    tmp_path: Path, name: str, options: dict[str, Any], text: str
) -> None:
    chosen = {"schedule.name": name, "schedule.options": options or "none"}
    (problem,) = job_precheck.problems(tiny(tmp_path, MLP, {**chosen, "data.name": "digits"}))
    assert text in problem


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "OneCycleLR", "options": CLASSES["OneCycleLR"], "interval": "step"},
        {"name": "StepLR", "options": {"step_size": 1}, "warmup_steps": 6},
    ],
    ids=["by step", "by epoch"],
)
def test_a_run_that_is_stopped_within_an_epoch_goes_on_at_the_same_rates(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    chosen = {f"schedule.{name}": value for name, value in settings.items()} | {"log.every": 1}
    world.run(2, tiny_jobs.trains, tiny(tmp_path / "undisturbed", DOUBLE, chosen))
    job = tiny(tmp_path / "run", DOUBLE, chosen)
    stop(2, job, 5)
    world.run(2, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(tmp_path / "undisturbed"))
    rates = [line["lr"] for line in metrics(tmp_path / "run") if "lr" in line]
    ours = RateSchedule(job, [4, 4, 4])
    assert rates == pytest.approx([0.1 * ours.factor(step / 4, step) for step in range(12)])
    assert len(set(rates)) > 2


def test_every_group_keeps_its_own_base_rate() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups)
    for multiplier in (0.5, 0.25):
        assert set_learning_rate(optimizer, multiplier) == pytest.approx(0.1 * multiplier)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.1 * multiplier, 0.2 * multiplier]
        )
