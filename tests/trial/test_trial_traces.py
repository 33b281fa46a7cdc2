"""A trial leaves everything as it was: models, counters, random numbers."""

from __future__ import annotations

import io
import random
from collections import Counter
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from known_losses import N, labels, x
from torch import Tensor, nn

from shoal.trial import LossKind, try_loss

CALLS = Counter[str]()


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, []

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class Counting(nn.Module):
    """A model that changes all that a model can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.ema, self.calls, self.log = torch.zeros(4), 0, []

    def forward(self, a: Tensor) -> Any:
        self.seen += 1
        self.calls += 1
        self.log.append(len(a))
        hidden = self.drop(self.norm(self.layer(a)))
        self.ema = 0.9 * self.ema + hidden.detach().mean(0)
        return hidden


def test_a_trial_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model, teacher = Counting(), Counting().eval()
    meters, hidden, count = {"loss": Meter()}, None, 0
    draws, shift = np.random.default_rng(3), torch.zeros(4)
    scale = nn.Parameter(torch.ones(()))
    seen_gradients: list[Tensor] = []
    model.layer.weight.register_hook(seen_gradients.append)
    model.layer.bias.grad = torch.ones(4)

    def loss(a: Tensor, y: Tensor) -> Tensor:
        nonlocal hidden, count
        count += 1
        CALLS["loss"] += 1
        shift.add_(1)
        a.mul_(float(np.random.rand() > 2) + 1)
        hidden = model(a) * scale * (1 + 0 * draws.random() + 0 * random.random())
        value = F.cross_entropy(hidden, y) + F.mse_loss(hidden, teacher(a).detach())
        meters["loss"].update(value.item())
        print("loss", value.item())
        return value

    def state() -> tuple[Any, ...]:
        tensors = [*model.state_dict().values(), *teacher.state_dict().values(), shift, model.seen]
        return (
            [tensor.tolist() for tensor in [*tensors, model.ema, torch.get_rng_state()]],
            *(model.calls, list(model.log), hidden, count, CALLS["loss"], meters["loss"].total),
            *(list(meters["loss"].values), random.getstate(), str(np.random.get_state())),
            *(str(draws.bit_generator.state), [module.training for module in model.modules()]),
            *([p.grad is None for p in model.parameters()], model.layer.bias.grad.tolist()),
        )

    a, y, before, output = x(), labels(), state(), io.StringIO()
    with redirect_stdout(output):
        verdict = try_loss(loss, (a, y), {}, N, [model])
    assert verdict.kind is LossKind.MEAN, verdict
    assert state() == before
    assert output.getvalue() == ""
    assert seen_gradients == []
    F.cross_entropy(model.layer(a), y).backward()
    assert len(seen_gradients) == 1


def test_the_random_numbers_of_a_step_are_those_of_a_step_without_trial() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    a, y = x(), labels()

    def loss(a: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(a + torch.randn_like(a)), y)

    torch.manual_seed(5)
    plain = [loss(a, y).item() for _ in range(3)]
    torch.manual_seed(5)
    try_loss(loss, (a, y), {}, N, [model])
    assert [loss(a, y).item() for _ in range(3)] == plain
