"""How a step carries what the trial of its loss has found."""

from typing import Any, ClassVar

import pytest
import torch

import shoal
from shoal.strategies.base import OBJECTIONS


def test_an_objection_travels_with_every_step_until_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Objecting:
        """A trial that has objected in an earlier step, and is not due again."""

        verdict, objection, is_scheduled = "an objection", 1, False
        bounds_gradients = False
        told: ClassVar[list[int]] = []

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def is_due(self, _: Any) -> bool:
            return False

        def after_step(self, objections: int) -> None:
            self.told.append(objections)

    monkeypatch.setattr("shoal.run.step_trials.LossTrial", Objecting)
    run = shoal.init(announce=lambda _: None)
    model = torch.nn.Linear(3, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.forward_backward(lambda x: model(x).mean(), torch.ones(4, 3))
    assert run.totals is not None
    assert run.totals[OBJECTIONS] == 1
    assert Objecting.told == [1]
