"""54 losses of known scripts: which are means, which are not, and which cannot be judged."""

from __future__ import annotations

import pytest
import torch
from known_losses import CASES, Case, N

from shoal.trial import try_loss


def test_there_are_54_losses() -> None:
    assert len(CASES) == 54


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loss_gets_its_verdict_from_gradients_of_parts(case: Case) -> None:
    torch.manual_seed(0)
    compute_loss, args, models = case.make()
    verdict = try_loss(compute_loss, args, {}, N, models)
    assert verdict.kind is case.kind, verdict
