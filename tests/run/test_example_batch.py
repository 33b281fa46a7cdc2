"""The example that strategies plan with: a run of the user's function that leaves no trace."""

from typing import Any

import torch
from minimal_script import quiet
from torch import Tensor, nn

from shoal.run.example_batch import example_of
from shoal.strategies.base import LocalBatch, Step


class Counting(nn.Module):
    """A layer that counts its passes, in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.passes = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.passes += 1
        self.seen.add_(len(x))
        scores: Tensor = self.layer(x) * scale
        return scores


def test_called_models_are_noted_and_nothing_is_changed() -> None:
    model = Counting()
    model.layer.weight.grad = torch.ones(3, 4)

    calls = 0

    def compute_loss(x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return model(x, scale=torch.rand(()).item()).square().mean() + model(x).mean()

    batch = LocalBatch(Step(compute_loss, 40), (torch.ones(20, 4),), {}, 20)
    example = example_of(batch, [model], quiet().mesh, accumulate=1)
    assert example.called_models == {model}
    assert example.args[0].shape == (8, 4)
    assert (calls, model.passes, model.seen.item()) == (0, 0, 0.0)
    assert torch.equal(model.layer.weight.grad, torch.ones(3, 4))
    assert example.num_samples == 40


def test_random_numbers_go_on_where_they_were() -> None:
    model, run = Counting(), quiet()
    before = torch.get_rng_state()
    batch = LocalBatch(
        Step(lambda x: model(x).mean() * torch.rand(()), 2), (torch.ones(2, 4),), {}, 2
    )
    example_of(batch, [model], run.mesh, accumulate=1)
    assert torch.equal(torch.get_rng_state(), before)
