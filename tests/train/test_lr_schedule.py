import pytest
import torch
from torch import nn

from shoal.config.job import ScheduleConfig
from shoal.train.optimizer import factor, set_learning_rate


def test_warm_up_is_linear_from_its_factor_to_one() -> None:
    schedule = ScheduleConfig(name="constant", warmup_epochs=2, warmup_factor=0.1)
    assert [factor(schedule, epochs, 0.0) for epochs in (0, 1, 2, 3)] == pytest.approx(
        [0.1, 0.55, 1.0, 1.0]
    )


def test_cosine_falls_from_one_to_its_final_factor() -> None:
    schedule = ScheduleConfig(name="cosine", final_factor=0.1)
    assert [factor(schedule, 1, progress) for progress in (0, 0.5, 1)] == pytest.approx(
        [1.0, 0.55, 0.1]
    )


def test_steps_multiply_at_their_milestones() -> None:
    schedule = ScheduleConfig(name="step", milestones=(2, 4), gamma=0.1)
    assert [factor(schedule, epochs, 0.5) for epochs in (0, 1.99, 2, 4.5)] == pytest.approx(
        [1, 1, 0.1, 0.01]
    )


def test_warm_up_multiplies_the_shape() -> None:
    schedule = ScheduleConfig(name="cosine", warmup_epochs=1, warmup_factor=0.0)
    assert factor(schedule, 0.5, 0.5) == pytest.approx(0.25)


def test_every_group_keeps_its_own_base_rate() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups)
    for multiplier in (0.5, 0.25):
        assert set_learning_rate(optimizer, multiplier) == pytest.approx(0.1 * multiplier)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.1 * multiplier, 0.2 * multiplier]
        )
