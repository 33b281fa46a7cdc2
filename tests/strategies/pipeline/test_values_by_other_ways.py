"""Values that reach the loss by a hook or by an attribute, in a pipeline of two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.testing import world


class Sparse(nn.Module):
    """Leaves a part of the loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        self.penalty = hidden.mean()
        out: Tensor = x + self.down(hidden)
        return out


def trained(strategy: str, by_hook: bool) -> list[float]:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(3)] if by_hook else [Sparse() for _ in range(3)]
    model = nn.Sequential(*layers).double()
    features: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda _, given, out: features.update(first=out))
    model[2].register_forward_hook(lambda _, given, out: features.update(last=out))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if by_hook:
            return loss + (features["first"] - features["last"]).square().mean()
        for layer in model:
            loss = loss + layer.penalty
        return loss

    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        x = torch.randn(5, 6, generator=generator).double()
        y = torch.randint(6, (5,), generator=generator)
        losses.append(run.forward_backward(compute_loss, *run.share((x, y))).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("by_hook", [True, False])
def test_what_a_hook_or_an_attribute_keeps_of_a_block_is_as_on_one_device(by_hook: bool) -> None:
    expected = trained("single", by_hook)
    for losses in world.run(2, trained, "pipeline=2", by_hook):
        assert losses == pytest.approx(expected, rel=1e-10)


def kept_in_a_tensor(strategy: str) -> tuple[list[float], Tensor]:
    """Train with a loss that keeps the outputs of its last rows, which do not count in it."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = torch.arange(12, dtype=torch.float64).sin().view(4, 3)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    kept = torch.zeros(2, 4, dtype=torch.float64)

    def compute_loss(x: Tensor) -> Tensor:
        out = model(x)
        loss = out.square().mean() + 0.0 * kept.clone().sum()
        kept[:, : len(out)] = out.detach().T
        return loss

    losses = []
    for _ in range(2):
        losses.append(run.forward_backward(compute_loss, run.share(x)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, kept


def test_what_the_loss_writes_into_a_tensor_of_the_script_has_values_on_the_last_rank() -> None:
    expected, _ = kept_in_a_tensor("single")
    (losses, _), (_, kept) = world.run(2, kept_in_a_tensor, "pipeline=2")
    assert losses == pytest.approx(expected, rel=1e-10)
    assert kept.abs().sum() > 0
