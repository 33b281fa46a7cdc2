"""`nn.DataParallel` as a strategy: one process copies its model to several GPUs in every step.

      GPU 0   model ── copy ──> forward of rows 0..3  ── outputs ──┐
      GPU 1           └──────> forward of rows 4..7  ── outputs ──┴─> loss on GPU 0, backward,
                                                                      gradients added on GPU 0

It takes all GPUs that its process sees, and needs no launcher and no process group. It is slower
than ddp, which keeps a copy on each GPU: all weights are copied in every forward pass and all
gradients in every backward pass, one Python thread at a time drives all GPUs, and GPU 0 holds all
outputs and the optimizer's state.

A call of a prepared model is divided along dimension 0 of its tensors, and its outputs are joined
along dimension 0. So a model that returns its loss, a scalar, is none for this strategy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import is_compiled
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.options import ONE_PROCESS, NoOptions
from shoal.strategies.wrap_units import user_models

WHY_DDP = (
    "ddp with a process for each GPU (`shoal launch -n N --strategy ddp`) is faster: each keeps a "
    "copy of the model, and sends gradients while the backward pass goes on."
)


class DataParallelReplicas(NoOptions, Strategy):
    """Copies of the model on several GPUs of one process, made anew in each forward pass."""

    def cost(self, step: StepCost) -> StepCost:
        """Raise StrategyRefused: copies made anew in each forward pass are never the best way."""
        raise StrategyRefused(
            "dataparallel is there for comparison, and its costs are not modelled. Use ddp."
        )

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward` of the user's models.

        On the CPU, or with one GPU, the local model stays as it is, with a line that says so.

        Raises: StrategyRefused: several ranks; a model that computes again in the backward pass, or
            is compiled.
        """
        if mesh.size > 1:
            raise StrategyRefused(ONE_PROCESS.format(ranks=mesh.size))
        gpus = torch.cuda.device_count() if mesh.device.type == "cuda" else 0
        if gpus < 2:
            return _with_line(
                model,
                f"dataparallel: one device ({mesh.device}), so it computes as single does. On "
                f"several, {WHY_DDP}",
            )
        _check_replicable(model)
        for user_model in user_models(model.module):
            replicate_calls(user_model, nn.DataParallel(user_model, [*range(gpus)]))
        return _with_line(
            model,
            f"dataparallel: one process, {gpus} GPUs, and every step copies the whole "
            f"model to each of them. {WHY_DDP}",
        )

    @property
    def deviations(self) -> list[str]:
        """Sentences for the beginning of a run: how numbers differ from those of one device."""
        if torch.cuda.device_count() < 2:
            return []
        return [
            "dataparallel: each GPU computes its own rows, so BatchNorm normalises over these, "
            "dropout draws on each, and what copies write into buffers is lost but on the first."
        ]


def replicate_calls(model: nn.Module, parallel: nn.Module) -> None:
    """Let calls of `model` compute their rows on several devices.

    Args: parallel: `nn.DataParallel` of `model`.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        # The copies take all attributes of the instance, and must have the forward of the class.
        del model.__dict__["forward"]
        try:
            return parallel(*args, **kwargs)
        finally:
            setattr(model, "forward", forward)  # noqa: B010

    setattr(model, "forward", forward)  # noqa: B010


def _with_line(model: LocalModel, line: str) -> LocalModel:
    return replace(model, summary_lines=(*model.summary_lines, line))


def _check_replicable(model: LocalModel) -> None:
    """Raise StrategyRefused for what copies of a model cannot take over."""
    if model.pass_traits.recomputes:
        raise StrategyRefused(
            "dataparallel with recompute: what is computed again belongs to the model on the first "
            "GPU. Use ddp,recompute with a process for each GPU."
        )
    if any(is_compiled(module) for module in model.module.modules()):
        raise StrategyRefused(
            "dataparallel with compile: copies would call the compiled model of the first GPU. Use "
            "ddp with a process for each GPU, or compile=False."
        )
