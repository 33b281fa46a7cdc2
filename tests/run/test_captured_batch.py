"""Labels that a loss reads from around it are not divided: one sentence says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import world

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(8) % 3


def sentences(strategy: str, accumulate: int) -> list[str]:
    """Return what is said of a captured label, and of a captured weight that is no label."""
    found = []
    for captures_labels in (True, False):
        torch.manual_seed(0)
        run = shoal.init(strategy, accumulate=accumulate, precision="fp64", announce=lambda _: None)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        x, labels = run.share((ROWS, LABELS))
        weights = torch.ones(len(x), dtype=torch.float64)
        net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def loss_of_captured(x: Tensor, net: nn.Module = net, labels: Tensor = labels) -> Tensor:
            return F.cross_entropy(net(x), labels)

        def faulty(x: Tensor, net: nn.Module = net, weights: Tensor = weights) -> Tensor:
            raise ValueError("another error")

        with pytest.raises((UsageError, ValueError)) as raised:
            run.forward_backward(loss_of_captured if captures_labels else faulty, x)
        found.append(f"{raised.type.__name__}: {raised.value}")
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [("single", 1, 2), ("ddp", 2, 2), pytest.param("zero3", 2, 4, marks=pytest.mark.slow)],
)
def test_labels_of_the_whole_batch_that_are_no_argument_are_named(
    strategy: str, ranks: int, accumulate: int
) -> None:
    for captured, other in world.run(ranks, sentences, strategy, accumulate):
        assert captured.startswith(f"{UsageError.__name__}: ")
        assert f"compute_loss reads labels of shape ({8 // ranks},) from around it" in captured
        assert "run.forward_backward(compute_loss, ..., labels)" in captured
        assert other == "ValueError: another error"


def sentence_in_a_pipeline(microbatches: int) -> str:
    run = shoal.init(
        f"pipeline=2,microbatches={microbatches}", precision="fp64", announce=lambda _: None
    )
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = torch.utils.data.TensorDataset(ROWS, LABELS)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    net, _, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    [(x, y)] = loader
    with pytest.raises(UsageError) as raised:
        run.forward_backward(lambda x: F.cross_entropy(net(x), y), x)
    return str(raised.value)


def test_so_are_labels_that_the_loss_of_a_pipeline_captures() -> None:
    for said in world.run(2, sentence_in_a_pipeline, 4):
        assert "compute_loss reads y of shape (8,) from around it" in said
