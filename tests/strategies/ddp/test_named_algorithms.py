"""ddp with a named all-reduce trains as one process does, and prints the algorithm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import LaunchError
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.verification import verify_job
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


def test_the_header_says_which_algorithm_is_used_and_where_bits_may_differ() -> None:
    first, *others = world.run(3, _said, "ddp,allreduce=ring")
    assert "all-reduce: ring, over 3 ranks on 1 host" in first
    assert any("last bit" in line for line in first)
    assert others == [[], []]
    assert not any("last bit" in line for line in world.run(3, _said, "ddp,allreduce=tree")[0])


@pytest.mark.parametrize("line", ["tensor=2,ddp,allreduce=ring", "pipeline=2,ddp,allreduce=ring"])
def test_an_algorithm_beside_another_cut_is_refused(line: str) -> None:
    with pytest.raises(LaunchError, match="does not stand beside tensor, pipeline or compress"):
        world.run(4, _mlp, line)


def _mlp(strategy: str) -> None:
    run, model = shoal.init(strategy), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    data = torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.zeros(8, 8))
    _, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)
    )
    for x, y in loader:  # a pipeline is made with the first batch
        run.forward_backward(supervised(F.mse_loss, model), x, y)
