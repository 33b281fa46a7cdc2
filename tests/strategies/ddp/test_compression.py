"""ddp with compressed gradients: exact if nothing is left out; otherwise the run says so."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import StrategyRefused
from shoal.run.supervised import supervised
from shoal.testing import world
from shoal.verification import verify_job
from tests.harness.in_turn import in_turn
from tests.matrix.cases import EXPERIMENTS, images

NAMES = ["bf16", "fp16", "topk=0.1", "onebit", "powersgd=1"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lstm", marks=pytest.mark.slow),
        "unused, frozen, shared and scalar parameters",
    ],
)
def test_matrices_of_full_rank_are_sent_as_they_are_and_exact(name: str) -> None:
    verdict = verify_job(EXPERIMENTS[name], "ddp,compress=powersgd=1000", 3, accumulate=2)
    assert verdict.verdict == "exact", verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_verify_says_by_design_and_why(name: str) -> None:
    verdict = verify_job(EXPERIMENTS["mlp"], f"ddp,compress={name}", 2)
    assert verdict.verdict == "differs by design"
    assert verdict.reasons == [f"compress={name} is not exact: gradients arrive rounded, or late."]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10)).double()


def trained(strategy: str) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and losses."""
    run, model = shoal.init(strategy, announce=lambda _: None), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    losses = []
    for _ in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(run.forward_backward(supervised(F.cross_entropy, model), x, y).item())
            optimizer.step()
    return run.weights(), losses


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_compressed_goes_most_of_the_way_and_ranks_stay_together(name: str) -> None:
    exact, _ = trained("single")
    (weights, losses), *others = world.run(3, trained, f"ddp,compress={name},bucket_mb=0.01")
    for other, their_losses in others:
        assert all(torch.equal(other[key], value) for key, value in weights.items())
        assert their_losses == losses
    start = net().state_dict()
    moved = sum(float((exact[key] - value).square().sum()) for key, value in start.items()) ** 0.5
    away = sum(float((exact[key] - value).square().sum()) for key, value in weights.items()) ** 0.5
    assert away < 0.5 * moved


def broken_off() -> int:
    """Return the number of residuals after a step that ends early with NaNs, and a good one."""
    run, model = shoal.init("ddp,compress=onebit,bucket_mb=0.0001", announce=lambda _: None), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(images(), batch_size=10))
    x, y = next(iter(loader))
    hook = model[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.forward_backward(
            supervised(lambda output, target: F.cross_entropy(output, target) * torch.nan, model),
            x,
            y,
        )
    hook.remove()
    optimizer.zero_grad()
    run.forward_backward(supervised(F.cross_entropy, model), x, y)
    return len(run._local_model().strategy_state.rank_state_dict())  # type: ignore[union-attr]


def test_a_step_that_is_broken_off_leaves_nothing_to_the_next() -> None:
    assert world.run(2, broken_off) == [4, 4]


def refused(strategy: str, precision: str) -> str:
    with pytest.raises(StrategyRefused) as error:
        train_slices(strategy, precision)
    return str(error.value)


def train_slices(strategy: str, precision: str) -> None:
    kind: Any = precision
    run = shoal.init(strategy, precision=kind, announce=lambda _: None)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)
    )
    data = torch.utils.data.TensorDataset(torch.ones(8, 64), torch.zeros(8, dtype=torch.int64))
    _, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)
    )
    for x, y in loader:  # a pipeline is made with the first batch
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


def test_what_does_not_go_together_is_said_before_the_first_step() -> None:
    scaled = ("ddp,compress=topk=0.1", "fp16")
    divided = [(f"{axis}=2,ddp,compress=bf16", "fp32") for axis in ("tensor", "pipeline")]
    for of_scale, *texts in world.run(2, in_turn, refused, scaled, *divided):
        assert "Use bf16" in of_scale
        assert all("beside tensor and pipeline" in text for text in texts)


def halved() -> bool:
    run = shoal.init("ddp,compress=bf16", precision="fp16", announce=lambda _: None)
    model = nn.Linear(3, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return True


def test_two_bytes_keep_nothing_and_go_with_a_loss_scale() -> None:
    assert all(world.run(2, halved))


def notes_on_draws() -> list[str]:
    notes: list[str] = []
    run, model = shoal.init("ddp,compress=powersgd=1", announce=notes.append), net()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(model(run.share(torch.ones(8, 64).double())).square().mean())
    return [note for note in notes if "draws random numbers" in note]


def test_the_first_guess_of_powersgd_is_no_draw_of_the_script() -> None:
    assert world.run(2, notes_on_draws) == [[], []]
