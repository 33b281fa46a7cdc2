"""A loss may write into its batch: it does so once, as on one device."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world


def trained(strategy: str, accumulate: int) -> list[float] | str:
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(14, 6).double(), torch.randint(4, (14,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 7))

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5).add_(0.1)
        y[y == 3] = 2
        return F.cross_entropy(model(x), y)

    losses = []
    try:
        for x, y in loader:
            for _ in range(2):  # the second step sees what the first has written
                losses.append(run.forward_backward(compute_loss, x, y).item())
                optimizer.step()
                optimizer.zero_grad()
    except StrategyRefused as error:
        return str(error)
    return losses


def test_micro_batches_are_written_once() -> None:
    expected = torch.tensor(trained("single", 1))
    for strategy, ranks in (("single", 1), ("ddp", 2)):
        for losses in world.run(ranks, trained, strategy, 2):
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-10, atol=0)


def test_a_pipeline_refuses_it_with_the_cure() -> None:
    for text in world.run(2, trained, "pipeline=2", 1):
        assert "writes into its batch" in text
        assert "x = x.clone()" in text
