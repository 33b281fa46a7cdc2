"""Groups of optimizers under a pipeline: scripts see all stages, a step those of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_step import assert_same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.testing import world


class Failing(torch.optim.SGD):
    """Fails in its first step, and steps without a look at which gradients are there."""

    parameterwise = True
    fails = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            self.fails = False
            raise MemoryError("the first step")
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def trained(strategy: str) -> tuple[list[int], list[int], dict[str, Tensor]]:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    body: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double()
    head: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    first, second = Failing(body.parameters(), lr=0.1), Failing(head.parameters(), lr=0.2)
    second.fails = False
    data = TensorDataset(torch.randn(12, 6).double(), torch.randint(3, (12,)))
    body, head, first, second, batches = run.prepare(body, head, first, second, DataLoader(data, 6))
    counts = []
    for x, y in batches:
        run.forward_backward(lambda x, y: F.cross_entropy(head(body(x)), y), x, y)
        if first.fails:
            with pytest.raises(MemoryError):
                first.step()
        else:
            first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        counts.append(sum(p.numel() for p in second.param_groups[0]["params"]))
    return counts, [len(o.param_groups[0]["params"]) for o in (first, second)], run.weights()


def test_a_step_that_fails_leaves_the_groups_of_other_optimizers_alone() -> None:
    counts, lengths, expected = trained("single")
    for found in world.run(2, trained, "pipeline=2"):
        assert found[:2] == (counts, lengths)
        assert_same(found[2], expected)
