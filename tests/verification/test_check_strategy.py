"""The conformance check can fail, without which it would be no proof."""

import pytest
import torch.nn.functional as F
from torch import Tensor, distributed

from shoal.testing.check_strategy import check_strategy
from shoal.verification import Experiment
from tests.matrix.cases import image_loader, mlp


def wrong_scale(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * distributed.get_world_size()


def test_a_wrong_scale_is_caught() -> None:
    with pytest.raises(AssertionError, match="differs from one process:"):
        check_strategy("ddp", 2, Experiment(mlp, image_loader, wrong_scale))
