"""Every step begins with the first rank's buffers, if a forward pass changes buffers."""

import torch
import torch.nn.functional as F
from any_step import assert_same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from unusual_samples import rows

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world
from tests.harness.in_turn import in_turn


class Moving(nn.Module):
    """A moving average in a new tensor after every pass, and a buffer that the first pass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("average", torch.zeros(1))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + 0.5 * x.mean().detach().view(1)
        self.late = self.average + 1
        found: Tensor = self.layer(x) + self.average
        return found


def trained(strategy: str) -> dict[str, Tensor]:
    """Return weights after batches of 12 and 5 samples, twice.

    Of the 5, ranks have different numbers of micro-batches.
    """
    torch.manual_seed(0)
    # The model adds a mean of the batch to its outputs, which a trial of the loss refuses.
    run = shoal.init(strategy, accumulate=3, announce=lambda _: None, guards=False)
    model = Moving().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(Subset(rows(), range(17)), batch_size=12)
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(supervised(F.mse_loss, model), x, y)
            optimizer.step()
    return run.weights()


def test_they_are_shared_as_ddp_shares_them() -> None:
    strategies = "ddp", "ddp,bucket_mb=0.0001", "ddp,compress=powersgd=100", "local=1"
    (expected, *found), (_, *others) = world.run(2, in_turn, trained, *zip(strategies, strict=True))
    for weights in (*found, *others):
        assert_same(weights, expected)
