"""Mixed precision: the forward pass under autocast; for fp16, gradients scaled so that small ones
survive.

fp16 gradients below 6e-8 become zero, so the objective is multiplied by a large scale and the
gradients are divided by
it before the optimizer sees them. When they overflow, on whatever rank, every rank sees it after
the reduction: the step is skipped on all of them alike and the scale halved (Micikevicius et al.,
ICLR 2018). Who skips it is `shoal.run.loss_scaling`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.errors import TrainingDiverged
from shoal.platform.torch_private.kernels import foreach_mul_
from shoal.strategies.base import ForwardOutput, LocalBatch, LocalModel, Strategy, gradient_norm

GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 2.0**-20
"""About 1e-6: gradients that overflow even then are no matter of precision."""


class LossScale:
    """The dynamic scale of fp16, the same on every rank because all see the same gradients."""

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale, self.good_steps, self.skipped = scale, 0, 0

    def update(self, finite: bool) -> None:
        """Halve after an overflow; double after GROWTH_INTERVAL good steps.

        Raises: TrainingDiverged: below SMALLEST_SCALE.
        """
        if not finite:
            self.scale, self.good_steps, self.skipped = self.scale / 2, 0, self.skipped + 1
            if self.scale < SMALLEST_SCALE:
                raise TrainingDiverged(
                    f"fp16: gradients still overflow at a loss scale of {self.scale:.1e}, after "
                    f"{self.skipped} skipped "
                    "steps in all, so the loss itself is not finite or far too large. Look at the "
                    "loss and the data, "
                    "lower the learning rate, or use bf16, which needs no loss scale."
                )
        elif self.good_steps + 1 == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0
        else:
            self.good_steps += 1

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
        self.skipped = int(state["skipped"])


@dataclass(frozen=True)
class Precision(Strategy):
    """Args: name: fp64 and fp32 leave the model as it is; bf16 and fp16 are autocast.
    loss_scale: for fp16.
    """

    name: Literal["fp64", "fp32", "bf16", "fp16"]
    loss_scale: LossScale | None = None

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces forward."""
        if self.name in ("fp64", "fp32"):
            return model
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.name]

        def forward(batch: LocalBatch) -> ForwardOutput:
            with torch.autocast(mesh.device.type, dtype):
                return model.forward(batch)

        scale = self.loss_scale
        if scale is None:
            return replace(model, forward=forward)

        def scaled(batch: LocalBatch) -> ForwardOutput:
            outcome = forward(batch)
            return outcome._replace(loss=outcome.loss * scale.scale)

        return replace(model, forward=scaled)


def unscale(part: LocalModel, loss_scale: LossScale) -> bool:
    """Divide owned gradients by the scale; make them all NaN when one is not finite, for the step
    is to be skipped.

    Returns: whether they were finite.
    """
    gradients = {name: p.grad for name, p in part.trainable_params.items() if p.grad is not None}
    if not gradients and part.pipeline_axis is None:
        return True
    if gradients:
        foreach_mul_(
            [to_local(gradient) for gradient in gradients.values()], 1.0 / loss_scale.scale
        )
    finite = bool(torch.isfinite(gradient_norm(part, gradients)))
    if not finite:
        for gradient in gradients.values():
            to_local(gradient).fill_(torch.nan)
    loss_scale.update(finite)
    return finite
