"""ddp with a named all-reduce trains as one process does, and prints the algorithm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import StrategyRefused
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.verification import verify_job
from tests.harness.in_turn import in_turn
from tests.matrix.cases import EXPERIMENTS, images


@pytest.mark.slow
def test_training_with_an_algorithm_is_exact() -> None:
    strategy = "ddp,allreduce=tree,bucket_mb=0.01"  # several buckets
    for name in ("lstm", "unused, frozen, shared and scalar parameters"):
        verdict = verify_job(EXPERIMENTS[name], strategy, 3, timeout_s=60)
        assert verdict.verdict == "exact", verdict


def _said(strategy: str) -> list[str]:
    said: list[str] = []
    run, model = (
        shoal.init(strategy, announce=said.append),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    for x, y in loader:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
    return said


@pytest.mark.slow
def test_the_header_says_which_algorithm_is_used_and_where_bits_may_differ() -> None:
    calls = ("ddp,allreduce=ring",), ("ddp,allreduce=tree",)
    (ring, tree), *others = world.run(3, in_turn, _said, *calls)
    assert "all-reduce: ring, over 3 ranks on 1 host" in ring
    assert any("last bit" in line for line in ring)
    assert not any("last bit" in line for line in tree)
    assert others == [[[], []]] * 2


def test_an_algorithm_beside_another_cut_is_refused() -> None:
    calls = ("tensor=2,ddp,allreduce=ring",), ("pipeline=2,ddp,allreduce=ring",)
    for texts in world.run(4, in_turn, _refusal, *calls):
        for text in texts:
            assert "does not stand beside tensor, pipeline or compress" in text


def _refusal(strategy: str) -> str:
    with pytest.raises(StrategyRefused) as error:
        _train_mlp(strategy)
    return str(error.value)


def _train_mlp(strategy: str) -> None:
    run, model = shoal.init(strategy), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    data = torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.zeros(8, 8))
    _, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)
    )
    for x, y in loader:  # a pipeline is made with the first batch
        run.forward_backward(supervised(F.mse_loss, model), x, y)
