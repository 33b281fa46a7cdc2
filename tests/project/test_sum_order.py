"""The other order of sums, in which `make test-anywhere` runs the tests, changes rounding alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUM_ORDER = Path(__file__).parents[1] / "harness" / "sum_order"
RESULTS = """
import sys, torch, torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(6, 5, 8, 8, requires_grad=True)
weight = torch.randn(4, 5, 3, 3, requires_grad=True)
labels = torch.tensor([0, 3, 1, -100, 2, 3])
classes = torch.rand(4)
hidden = F.batch_norm(F.conv2d(x, weight), None, None, training=True).flatten(1)
logits = hidden @ torch.randn(hidden.shape[1], 4)
found = [hidden.sum(), hidden.sum((0, 1)), logits.softmax(-1), torch.dot(hidden[0], hidden[1])]
for reduction in ("none", "mean", "sum"):
    found.append(F.cross_entropy(logits, labels, reduction=reduction))
    found.append(F.cross_entropy(logits, labels, classes, reduction=reduction))
found += torch.autograd.grad(sum(each.mean() for each in found), (x, weight))
rows = torch.randn(9, 3, requires_grad=True)
taken = F.embedding(torch.tensor([1, 1, 2, 8, 1]), rows)
found += torch.autograd.grad((taken * torch.arange(5.0)[:, None]).sum(), rows)
torch.save([each.detach() for each in found], sys.argv[1])
"""


def results(place: Path, environment: dict[str, str]) -> list[torch.Tensor]:
    command = [sys.executable, "-c", RESULTS, str(place)]
    subprocess.run(command, env=os.environ | environment, check=True)
    found: list[torch.Tensor] = torch.load(place)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "wide"])
def test_no_result_changes_by_more_than_rounding(tmp_path: Path, kind: str) -> None:
    usual = results(tmp_path / "usual", {})
    other = {"PYTHONPATH": str(SUM_ORDER), "SHOAL_TEST_SUMS": kind}
    changed = 0
    for one, another in zip(usual, results(tmp_path / "other", other), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-4)
        changed += not torch.equal(one, another)
    assert changed >= 4
