"""ZeRO: optimizer states S, gradients G and parameters P in shards, one on each of n ranks.

                   between steps   in a step                    bytes of a parameter, fp32 AdamW
      ddp          P  G  S         P  G  S                      16
      zero1, zero2 P/n   S/n       P, gathered once;  G/n       16/n + all gathered parameters
      zero3        P/n   S/n       P of one or two units;  G/n  16/n + the units' parameters

      forward    gather unit 1 │ compute 1 ─ gather 2 │ compute 2 ─ (zero3: free 1, 2)
      backward   (zero3: gather 2) │ compute 2 ─ reduce-scatter gradients of 2 │ ... ─ free all
      step       each rank steps its shard

With gradient accumulation, zero1 sums full gradients and communicates once, with the last
micro-batch. zero2 and zero3 reduce-scatter after each micro-batch, and hold shards only. The totals
of a step are summed during the backward pass. All ranks gather and reduce the same units, whichever
they use (`lockstep.py`).

The engine is PyTorch's `fully_shard` (Zhao et al., VLDB 2023). ZeRO is Rajbhandari et al., SC 2020.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shoal.comm.mesh import Mesh, ensure_group
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.options import ZeroOptions
from shoal.strategies.zero.cost import cost
from shoal.strategies.zero.pipeline_zero1 import PipelineZeroOne
from shoal.strategies.zero.sharded_step import ShardedStep
from shoal.weights.deferred_weights import broadcast_filled


class Zero1(ZeroOptions, Strategy):
    """ZeRO-1: shard optimizer states."""

    takes_empty_weights: ClassVar[bool] = True
    stage: ClassVar[int] = 1

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward`, `run`, `call`, `trainable_params` and `reduce_gradients`. Collective.

        The parameters of the module become shards, in place. In a pipeline, see
        `pipeline_zero1.py`.

        Raises: StrategyRefused: no trainable parameter; hybrid or offload in a pipeline.
        """
        if model.is_partial:
            return self._shard_after_run(model, mesh)
        if not model.trainable_params:
            raise StrategyRefused(
                f"strategy zero{self.stage} shards what is trained; the model has no such "
                "parameter."
            )
        if mesh.data.size == 1 and not self.offload:
            return model
        ensure_group(mesh.device)
        broadcast_filled(model.module, mesh.data)
        self._check_gather(model)
        is_hybrid = "replicate" in (mesh.device_mesh.mesh_dim_names or ())
        arguments: dict[str, Any] = {
            "mesh": mesh.device_mesh[("replicate", "shard") if is_hybrid else "shard"]
        }
        if self.offload:
            pins = mesh.device.type == "cuda"
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
        if self.gather:  # inputs and outputs have the dtypes that autocast gives them
            arguments["mp_policy"] = MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, cast_forward_inputs=False
            )
        engine = ShardedStep(self.stage, model, mesh.data, self.unit, arguments)
        return replace(
            model,
            forward=engine.forward,
            run=engine.run,
            reduce_gradients=engine.reduce,
            outside_step=replace(
                model.outside_step,
                call=engine.call,
                reshard=engine.release,
                whole_models=engine.whole_models,
                hold=engine.hold,
                is_held=engine.root.is_held,
                settle_gradients=engine.settle_gradients,
            ),
            pass_traits=replace(model.pass_traits, collective_forward=True),
        )

    @property
    def deviations(self) -> list[str]:
        if not self.gather:
            return []
        return [
            f"zero{self.stage},gather=bf16: biases, norms and embeddings are rounded to bfloat16 "
            "in a step too. The optimizer steps float32."
        ]

    def cost(self, step: StepCost) -> StepCost:
        """Return the cost of shards: `zero/cost.py`."""
        return cost(self, self.stage, step)

    def _shard_after_run(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Shard optimizer states only: gradients are complete after all passes. Collective."""
        if self.hybrid or self.offload or self.gather:
            raise StrategyRefused(
                f"zero{self.stage} in a pipeline shards over all data ranks, in their own dtype, "
                "and keeps shards on the device. Leave out hybrid, offload and gather."
            )
        mesh.data.broadcast_module(model.module)
        if mesh.data.size == 1:
            return model
        engine = PipelineZeroOne(model, mesh.data, mesh.device_mesh)
        summary_lines = model.summary_lines
        if self.stage > 1:
            summary_lines += (
                f"in a pipeline, zero{self.stage} keeps what zero1 keeps: optimizer states are "
                "sharded.",
            )
        return replace(
            model,
            run=engine.run,
            trainable_params=model.trainable_params | engine.shards,
            reduce_gradients=engine.reduce,
            gather_params=engine.gather,
            summary_lines=summary_lines,
        )

    def _check_gather(self, model: LocalModel) -> None:
        """Raise StrategyRefused if `gather` rounds weights that a step computes with in float32."""
        if self.gather and model.pass_traits.autocast is not torch.bfloat16:
            raise StrategyRefused(
                f"zero{self.stage},gather=bf16 computes with rounded weights. Let the step compute "
                'in bfloat16, by precision="bf16" (train.precision=bf16), or leave out gather.'
            )
        if self.gather and any(isinstance(m, BatchNormBase) for m in model.module.modules()):
            raise StrategyRefused(
                f"zero{self.stage},gather=bf16: BatchNorm takes weights in the dtype of its "
                "statistics, float32. Leave out gather."
            )


class Zero2(Zero1):
    """ZeRO-2: shard optimizer states and gradients."""

    stage: ClassVar[int] = 2


class Zero3(Zero1):
    """ZeRO-3: shard optimizer states, gradients and parameters."""

    stage: ClassVar[int] = 3
