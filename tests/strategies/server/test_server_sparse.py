"""Sparse gradients of an embedding under parameter servers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_server import agree
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embed(x).mean(1))
        return scores


def with_words(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    run, model = shoal.init(strategy, announce=lambda _: None), Words().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    draws = torch.Generator().manual_seed(1)
    data = [(torch.randint(50, (4,), generator=draws), index % 3) for index in range(12)]
    batches = DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = run.prepare(model, optimizer, batches)
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    return run.weights()


def test_sparse_gradients_of_an_embedding_are_stepped_as_torch_does() -> None:
    expected = with_words("single")
    for found in world.run(2, with_words, "server=2,part_mb=0.001"):
        agree(found, expected)


def with_many_words(
    strategy: str, sparse: bool, momentum: float
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Return weights, and the bytes that the servers have received and sent."""
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Sequential(
        nn.Embedding(5000, 16, sparse=sparse), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    draws = torch.Generator().manual_seed(1)
    data = [(torch.randint(5000, (4,), generator=draws), index % 3) for index in range(24)]
    batches = DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = run.prepare(model, optimizer, batches)
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    weights = run.weights()
    part: Any = run._local_model()
    figures = part.remote_optimizer.client.stats()
    return weights, (
        sum(f["received_bytes"] for f in figures),
        sum(f["sent_bytes"] for f in figures),
    )


@pytest.mark.slow
def test_only_rows_of_a_sparse_gradient_are_sent_with_the_same_bits() -> None:
    strategy = "server=2,part_mb=0.1,shared_memory=false"
    dense, (dense_received, dense_sent) = world.run(2, with_many_words, strategy, False, 0.0)[0]
    rows, (received, sent) = world.run(2, with_many_words, strategy, True, 0.0)[0]
    assert all(torch.equal(rows[name], dense[name]) for name in dense)
    loaded = 5000 * 16 * 8
    assert dense_received > 12 * loaded
    assert received < 1.2 * loaded  # the first load, and little else
    assert sent < 0.05 * dense_sent


@pytest.mark.slow
def test_values_are_sent_whole_where_a_step_changes_all_of_them() -> None:
    strategy = "server=2,part_mb=0.1,shared_memory=false"
    dense, (_, dense_sent) = world.run(2, with_many_words, strategy, False, 0.9)[0]
    rows, (received, sent) = world.run(2, with_many_words, strategy, True, 0.9)[0]
    assert all(torch.equal(rows[name], dense[name]) for name in dense)
    assert received < 1.2 * 5000 * 16 * 8
    assert sent < dense_sent  # rows that no batch has touched yet do not move even under momentum
