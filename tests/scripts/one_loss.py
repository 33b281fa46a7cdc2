"""Scripts of the usual loop: one optimizer, one loader, and one loss a step."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.samples import loader, mlp, sgd, vectors
from tests.scripts.script import Result, Script, draw_as_rank_0, weights


class OneLossScript(Script):
    """A script that has nothing of its own but its parts, its loss, and what follows a step.

    Attributes:
        clip: the norm to which gradients are clipped, if they are.
        draws: True if the script draws random numbers, as the first rank does.
    """

    clip: ClassVar[float] = 0.0
    draws: ClassVar[bool] = False

    def setup(self) -> tuple[Any, ...]:
        """Return the models, the optimizer and the loader."""
        return parts(mlp(6, 8, 4), loader(*vectors()))

    def loss(self, model: Any, x: Any, y: Any) -> Tensor:
        """Return the loss in plain PyTorch; gets all models, then the batch, dicts by name."""
        return F.cross_entropy(model(x), y)

    def shoal_loss(self, run: Any, *models_and_batch: Any, **named: Any) -> Any:
        """Return the same loss with the lines changed that Shoal needs."""
        return self.loss(*models_and_batch, **named)

    def in_loop(self, *batch: Any) -> tuple[Any, ...]:
        """Return what the loop makes of a batch before it computes a loss."""
        return batch

    def before_step(self, step: int, model: Any, optimizer: Any) -> None:
        """Do what the script does between the backward pass and the step."""

    def after_step(self, step: int, model: Any, optimizer: Any, losses: list[Any]) -> None:
        """Do what the script does between two steps."""

    @classmethod
    def plain(cls) -> Result:  # type: ignore[override]
        self = cls()
        *models, optimizer, data = self.setup()
        if cls.draws:
            draw_as_rank_0()
        losses: list[Any] = []
        for step, batch in enumerate(data):
            batch, named = ((), batch) if isinstance(batch, dict) else (self.in_loop(*batch), {})
            optimizer.zero_grad()
            loss = self.loss(*models, *batch, **named)
            loss.backward()
            if cls.clip:
                nn.utils.clip_grad_norm_(models[0].parameters(), cls.clip)
            self.before_step(step, models[0], optimizer)
            optimizer.step()
            losses.append(loss)
            self.after_step(step, models[0], optimizer, losses)
        return losses, weights(*models)

    @classmethod
    def with_shoal(cls, run: Any) -> Result:  # type: ignore[override]
        self = cls()
        *models, optimizer, data = self.setup()
        *models, optimizer, data = run.prepare(*models, optimizer, data)

        def compute_loss(*batch: Any, **named: Any) -> Any:
            return self.shoal_loss(run, *models, *batch, **named)

        losses: list[Any] = []
        for step, batch in enumerate(data):
            batch, named = ((), batch) if isinstance(batch, dict) else (self.in_loop(*batch), {})
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, *batch, **named)
            if cls.clip:
                run.clip_gradients(cls.clip)
            self.before_step(step, models[0], optimizer)
            optimizer.step()
            losses.append(loss)
            self.after_step(step, models[0], optimizer, losses)
        return losses, run.weights()

    @classmethod
    def lines_of(cls, version: str) -> list[str]:
        """Return the lines of `plain` or `with_shoal` with the script's own loss among them."""
        shoals = version == "with_shoal" and cls.shoal_loss is not OneLossScript.shoal_loss
        loss = inspect.getsource(cls.shoal_loss if shoals else cls.loss).splitlines()[1:]
        if version == "plain":
            loss = [line.replace("return ", "loss = ") for line in loss]
        lines = super().lines_of(version)
        call = next(i for i, line in enumerate(lines) if "self." in line and "loss(" in line)
        lines[call : call + 1] = [line for line in loss if '"""' not in line]
        absent = ["in_loop", "before_step", *(() if cls.clip else ("clip",))]
        return [line for line in lines if not any(word in line for word in absent)]


def parts(*models_and_data: Any, lr: float = 0.1) -> tuple[Any, ...]:
    """Return models, SGD on all of them, and the data."""
    *models, data = models_and_data
    parameters = [parameter for model in models for parameter in model.parameters()]
    return *models, sgd(parameters, lr), data
