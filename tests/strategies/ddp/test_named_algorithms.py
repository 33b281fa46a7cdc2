"""ddp with an algorithm of its own for the all-reduce trains as one process does, and says which one it uses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import ConfigError, LaunchError
from shoal.proof import prove
from shoal.proof.zoo import EXPERIMENTS, images
from shoal.strategies import parse_line, with_allreduce
from shoal.testing import world

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("algorithm", "ranks", "accumulate"),
    [
        ("ring", 3, 1),
        pytest.param("ring", 4, 2, marks=SLOW),
        pytest.param("tree", 3, 1, marks=SLOW),
        ("halving-doubling", 3, 1),
        pytest.param("halving-doubling", 4, 1, marks=SLOW),
        pytest.param("hierarchical", 4, 1, marks=SLOW),
        ("auto", 3, 1),
    ],
)
def test_training_with_an_algorithm_is_exact(algorithm: str, ranks: int, accumulate: int) -> None:
    strategy = f"ddp,allreduce={algorithm},bucket_mb=0.01"  # several buckets
    for name in ("lstm", "unused, frozen, shared and scalar parameters"):
        verdict = prove(EXPERIMENTS[name], strategy, ranks, accumulate=accumulate, timeout_s=60)
        assert verdict.verdict == "exact", verdict


def _said(strategy: str) -> list[str]:
    said: list[str] = []
    run, model = shoal.init(strategy, announce=said.append), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    for x, y in loader:
        run.forward_backward(F.cross_entropy, model, x, y)
    return said


def test_the_header_says_which_algorithm_is_used_and_where_bits_may_differ() -> None:
    first, *others = world.run(3, _said, "ddp,allreduce=ring")
    assert "all-reduce: ring, over 3 ranks on 1 host" in first
    assert any("last bit" in line for line in first)
    assert others == [[], []]
    assert not any("last bit" in line for line in world.run(3, _said, "ddp,allreduce=tree")[0])


def _row(size_bytes: int, **seconds: float) -> dict[str, Any]:
    return {"hosts": 1, "ranks": 2, "size_bytes": size_bytes, "seconds": seconds}


def test_auto_goes_by_a_table_of_ones_own(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"machine": "mine", "rows": [_row(1024, tree=1, ring=2), _row(2**20, tree=2, ring=1)]}))
    said = world.run(2, _said, f"ddp,allreduce=auto,table={table}")[0]
    choice = "tree from 1 KiB, ring from 1024 KiB (measured for 2 ranks on 1: mine)"
    assert f"all-reduce: auto, over 2 ranks on 1 host: {choice}" in said


def test_a_table_that_is_no_text_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match=r"bytes\.json: there is no such file, or it is empty or no text"):
        world.run(2, _said, f"ddp,allreduce=auto,table={tmp_path}/bytes.json")


def test_a_table_that_is_not_there_is_an_error_on_every_rank() -> None:
    with pytest.raises(LaunchError, match=r"gone\.json: there is no such file"):
        world.run(2, _said, "ddp,allreduce=auto,table=gone.json")


@pytest.mark.parametrize("line", ["tensor=2,ddp,allreduce=ring", "pipeline=2,ddp,allreduce=ring"])
def test_an_algorithm_beside_another_cut_is_refused(line: str) -> None:
    with pytest.raises(LaunchError, match="does not stand beside tensor, pipeline or compress"):
        world.run(4, _mlp, line)


def _mlp(strategy: str) -> None:
    run, model = shoal.init(strategy), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    data = torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.zeros(8, 8))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ddp", "ddp,allreduce=ring"),
        ("recompute=2,unit=Linear", "recompute=2,unit=Linear,ddp,allreduce=ring"),
        ("ddp,bucket_mb=1,allreduce=tree", "ddp,bucket_mb=1,allreduce=ring"),
    ],
)
def test_the_flag_is_short_for_an_option_of_ddp(line: str, expected: str) -> None:
    assert with_allreduce(parse_line(line), "ring") == parse_line(expected)


def test_the_flag_beside_a_strategy_without_algorithms_is_refused() -> None:
    with pytest.raises(ConfigError, match="only ddp has algorithms"):
        with_allreduce(parse_line("zero3"), "ring")
