"""Mixed precision: the forward pass under autocast, and loss scaling for fp16.

      loss ── x scale ── backward ── reduce ── / scale ──┬── all finite: step
                                                         └── overflow: skip it, halve the scale

fp16 gradients below 6e-8 become zero. A large scale keeps them above that limit. If a gradient of
any rank overflows, every rank sees it after the reduction, so all ranks skip the same steps
(Micikevicius et al., ICLR 2018). `shoal.run.nonfinite_steps` skips the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.errors import TrainingDiverged
from shoal.platform.torch_private.kernels import foreach_mul_
from shoal.strategies.base import ForwardOutput, LocalBatch, LocalModel, Strategy
from shoal.strategies.local_step import gradient_norm

GROWTH_INTERVAL = 2000
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of the forward pass, by the names of precisions with autocast."""
SMALLEST_SCALE = 2.0**-20
"""About 1e-6. If gradients overflow even with this scale, precision is not the cause."""


class LossScale:
    """The dynamic loss scale of fp16. Equal on all ranks, because all see the same gradients.

    Attributes:
        scale: factor of the loss.
        good_steps: steps without overflow since the scale was last changed.
        skipped: steps with an overflow in this run.
    """

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale
        self.good_steps = 0
        self.skipped = 0

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after GROWTH_INTERVAL good steps.

        Raises: TrainingDiverged: below SMALLEST_SCALE.
        """
        if not finite:
            self.scale /= 2
            self.good_steps = 0
            self.skipped += 1
            if self.scale < SMALLEST_SCALE:
                raise TrainingDiverged(
                    f"fp16: gradients still overflow at a loss scale of {self.scale:.1e}, after "
                    f"{self.skipped} skipped steps in all, so the loss itself is not finite or far "
                    "too large. Look at the loss and the data, lower the learning rate, or use "
                    "bf16, which needs no loss scale."
                )
        elif self.good_steps + 1 == GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0
        else:
            self.good_steps += 1

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped = int(state["skipped"])


@dataclass(frozen=True)
class Precision(Strategy):
    """Precision of the forward pass.

    Args:
        name: fp64 and fp32 leave the model as it is; bf16 and fp16 use autocast.
        loss_scale: for fp16; None for the others.
    """

    can_apply_again: ClassVar[bool] = True
    takes_empty_weights: ClassVar[bool] = True
    name: Literal["fp64", "fp32", "bf16", "fp16"]
    loss_scale: LossScale | None = None

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward`."""
        if self.name not in AUTOCAST:
            return model
        dtype, scale = AUTOCAST[self.name], self.loss_scale

        def forward(batch: LocalBatch) -> ForwardOutput:
            with torch.autocast(mesh.device.type, dtype):
                output = model.forward(batch)
            return output if scale is None else output._replace(loss=output.loss * scale.scale)

        traits = replace(model.pass_traits, autocast=dtype)
        return replace(model, forward=forward, pass_traits=traits)


def unscale(model: LocalModel, loss_scale: LossScale) -> bool:
    """Divide owned gradients by the scale, and update the scale. Collective in a pipeline.

    If one gradient is not finite, all become NaN: the step is to be skipped, and no caller may use
    a part of them.

    Returns: True if all were finite.
    """
    gradients = {name: p.grad for name, p in model.trainable_params.items() if p.grad is not None}
    if not gradients and model.pipeline.axis is None:
        return True
    if gradients:
        foreach_mul_(
            [to_local(gradient) for gradient in gradients.values()], 1.0 / loss_scale.scale
        )
    finite = bool(torch.isfinite(gradient_norm(model, gradients)))
    if not finite:
        for gradient in gradients.values():
            to_local(gradient).fill_(torch.nan)
    loss_scale.update(finite)
    return finite
