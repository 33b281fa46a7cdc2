"""The conformance check can fail, without which it would be no proof."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from shoal.run.supervised import LossFunction
from shoal.testing.check_strategy import check_strategy
from shoal.verification import Experiment
from tests.matrix.cases import image_loader, mlp


def wrong_scale(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * distributed.get_world_size()


def one_rank_wrong(output: Tensor, target: Tensor) -> Tensor:
    wrong = distributed.get_rank() == 1
    return F.cross_entropy(output, target) * (1 + 1e-9 * wrong)


def not_a_number(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * (torch.nan if distributed.get_world_size() > 1 else 1)


@pytest.mark.parametrize(
    "loss_fn",
    [
        wrong_scale,
        pytest.param(one_rank_wrong, marks=pytest.mark.slow),
        pytest.param(not_a_number, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_scale_a_wrong_rank_and_a_nan_are_caught(loss_fn: LossFunction) -> None:
    with pytest.raises(AssertionError, match="differs from one process:"):
        check_strategy("ddp", 2, Experiment(mlp, image_loader, loss_fn))
