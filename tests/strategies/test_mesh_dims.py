"""The batch is split along the data axis alone, whatever other axes there are."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.verification import verify_job
from tests.matrix.cases import EXPERIMENTS, images


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [
        ("tensor_axis_worlds:BesideDdp", 4, 1),
        pytest.param(
            "tensor_axis_worlds:BesideDdp", 6, 2, marks=pytest.mark.slow
        ),  # sums in the order of ranks
        pytest.param("tensor_axis_worlds:BesideZero1", 6, 1, marks=pytest.mark.slow),
        pytest.param("tensor_axis_worlds:BesideZero3", 4, 2, marks=pytest.mark.slow),
        pytest.param("tensor_axis_worlds:BesideZero3,hybrid=2", 8, 1, marks=pytest.mark.slow),
        ("tensor_axis_worlds:BesideZero3,offload=true", 2, 1),
    ],
)
def test_training_beside_another_axis_is_exact(strategy: str, ranks: int, accumulate: int) -> None:
    for name in ("lstm", "unused, frozen, shared and scalar parameters"):
        verdict = verify_job(
            EXPERIMENTS[name], strategy, ranks, accumulate=accumulate, timeout_s=60
        )
        assert verdict.verdict == "exact", verdict


@pytest.mark.parametrize("name", ["dropout", "cnn with BatchNorm"])
def test_ranks_of_one_group_draw_alike_and_see_the_same_samples(name: str) -> None:
    assert (
        verify_job(EXPERIMENTS[name], "tensor_axis_worlds:BesideDdp", 2, timeout_s=60).verdict
        == "exact"
    )


def trained(strategy: str, file: Path) -> tuple[str, dict[str, float]]:
    torch.manual_seed(0)
    said: list[str] = []
    run, model = (
        shoal.init(strategy, announce=said.append),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    for x, y in loader:
        optimizer.zero_grad()
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()
    sums = run.evaluate(
        lambda x, y: {"loss": F.cross_entropy(model(x), y, reduction="sum")},
        DataLoader(images(), batch_size=3),
    )
    run.save(file)
    return said[0] if said else "", sums


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_evaluation_counts_every_sample_once_and_the_header_tells_of_the_axes(
    strategy: str, tmp_path: Path
) -> None:
    _, expected = trained("single", tmp_path / "single.pt")
    found = world.run(
        4, trained, f"tensor_axis_worlds:Beside{strategy.capitalize()}", tmp_path / "cut.pt"
    )
    assert found[0][0] == "global batch 10 = 2 data ranks x 5; 4 ranks = 2 data x 2 tensor"
    for _, sums in found:
        assert sums == pytest.approx(expected, rel=1e-12)
        assert sums == found[0][1]
    single, cut = (
        torch.load(tmp_path / name, weights_only=True) for name in ("single.pt", "cut.pt")
    )
    for name, value in single.items():
        assert torch.allclose(cut[name], value, rtol=1e-12, atol=0), name


def refused(strategy: str) -> None:
    shoal.init(strategy)


def test_sizes_that_do_not_divide_the_world_are_refused_at_init() -> None:
    with pytest.raises(
        shoal.errors.LaunchError,
        match=r"tensor=2 needs a multiple of 2 ranks; there are 3\. Try tensor=3\.",
    ):
        world.run(3, refused, "tensor_axis_worlds:BesideDdp")
