"""ddp with a named all-reduce trains as one process does, and prints the algorithm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import ConfigError, LaunchError
from shoal.run.supervised import supervised
from shoal.strategies import add_allreduce_option, parse_line
from shoal.testing import world
from shoal.verification import verify_job
from tests.matrix.cases import EXPERIMENTS, images

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("algorithm", "ranks", "accumulate"),
    [
        pytest.param("ring", 3, 1, marks=SLOW),
        pytest.param("ring", 4, 2, marks=SLOW),
        pytest.param("tree", 3, 1, marks=SLOW),
        ("halving-doubling", 3, 1),
        pytest.param("halving-doubling", 4, 1, marks=SLOW),
        pytest.param("hierarchical", 4, 1, marks=SLOW),
    ],
)
def test_training_with_an_algorithm_is_exact(algorithm: str, ranks: int, accumulate: int) -> None:
    strategy = f"ddp,allreduce={algorithm},bucket_mb=0.01"  # several buckets
    for name in ("lstm", "unused, frozen, shared and scalar parameters"):
        verdict = verify_job(
            EXPERIMENTS[name], strategy, ranks, accumulate=accumulate, timeout_s=60
        )
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ddp", "ddp,allreduce=ring"),
        ("recompute=2,unit=Linear", "recompute=2,unit=Linear,ddp,allreduce=ring"),
        ("ddp,bucket_mb=1,allreduce=tree", "ddp,bucket_mb=1,allreduce=ring"),
    ],
)
def test_the_flag_is_short_for_an_option_of_ddp(line: str, expected: str) -> None:
    assert add_allreduce_option(parse_line(line), "ring") == parse_line(expected)


def test_the_flag_beside_a_strategy_without_algorithms_is_refused() -> None:
    with pytest.raises(ConfigError, match="only ddp has algorithms"):
        add_allreduce_option(parse_line("zero3"), "ring")
