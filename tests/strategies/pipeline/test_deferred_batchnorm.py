"""Running statistics in micro-batches are those of the whole batch, whatever the numbers and
however many calls.
"""

import pytest
import torch
from torch import Tensor, nn

from shoal.strategies.pipeline.deferred_batchnorm import DeferredBatchNorm


@pytest.mark.parametrize("momentum", [0.1, None])
def test_small_variances_of_large_numbers_survive(momentum: float | None) -> None:
    x = 3000 + 0.05 * torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    norm, alone = (nn.BatchNorm1d(2, momentum=momentum) for _ in range(2))
    statistics = DeferredBatchNorm([norm])
    for part in x.split([16, 16, 32]):
        with statistics.counting(len(part)):
            norm(part)
    statistics.commit()
    alone(x)
    torch.testing.assert_close(norm.running_var, alone.running_var, rtol=1e-3, atol=1e-6)


def test_every_call_in_a_forward_pass_is_an_update() -> None:
    def twice(norm: nn.Module, x: Tensor) -> None:
        norm(norm(x) * 3 + 1)

    x = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norm, alone = (nn.BatchNorm1d(2).double() for _ in range(2))
    statistics = DeferredBatchNorm([norm])
    with statistics.counting(12, stage=0):
        twice(norm, x)
    with statistics.counting(12, stage=2):
        norm(x * 2)
    statistics.commit()
    twice(alone, x)
    alone(x * 2)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value, rtol=1e-12, atol=0)
