"""ZeRO: optimizer states, gradients and parameters in shards, one on each rank.

                     between steps               in a step                                 per parameter, fp32 AdamW
      ddp            P  G  S                     P  G  S                                   16 bytes
      zero1, zero2   P/n   S/n                   P, gathered once;  G/n                    16/n + what is gathered
      zero3          P/n   S/n                   P of one or two units at a time;  G/n     16/n + those units

      forward    gather unit 1 │ compute 1 ─ gather 2 │ compute 2 ─ (zero3: free 1, 2)
      backward   (zero3: gather 2) │ compute 2 ─ scatter the gradient of 2 │ ... ─ free all
      step       each rank steps its shard

The engine is PyTorch's `fully_shard` (Zhao et al., VLDB 2023); ZeRO is Rajbhandari et al., SC 2020.
With gradient accumulation, zero1 adds up whole gradients and communicates once, with the last part;
zero2 and zero3 scatter each part's, and hold shards only. The totals of a step are summed beside
the backward pass. All ranks gather and reduce the same units, whichever they use (`lockstep.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh, ensure_group, register_cleanup
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.pytree import tree_map
from shoal.platform.torch_private.tensor_state import is_view
from shoal.strategies.base import (
    Forward,
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
    Strategy,
)
from shoal.strategies.mean_scaling import mean_result, scaled_for_mean
from shoal.strategies.options import ZeroOptions
from shoal.strategies.wrap_units import innermost, units
from shoal.strategies.zero.lockstep import Lockstep
from shoal.strategies.zero.pipeline_zero1 import PipelineZeroOne


class Zero1(ZeroOptions, Strategy):
    """Optimizer states in shards."""

    stage: ClassVar[int] = 1

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces module (in place), forward, run, owned, reduce. Collective.

        Raises: StrategyRefused: no trainable parameter.
        """
        if model.pass_traits.complete_after_run:
            return self._shard_after_run(model, mesh)
        if not model.trainable_params:
            raise StrategyRefused(
                f"strategy zero{self.stage} shards what is trained; the model has no such "
                "parameter."
            )
        if mesh.data.size == 1 and not self.offload:
            return model
        ensure_group()
        mesh.data.broadcast_module(model.module)
        engine = ShardedStep(self.stage, model, mesh.data)
        names = mesh.device_mesh.mesh_dim_names or ()
        over = mesh.device_mesh[("replicate", "shard") if "replicate" in names else "shard"]
        engine.shard(over, self.unit, self._policy(mesh))
        return replace(
            model,
            forward=engine.forward,
            run=engine.run,
            trainable_params=engine.owned(),
            reduce_gradients=engine.reduce,
            reshard=engine.release,
            collective_forward=True,
            maybe_unused=engine.lockstep.lacking if engine.lockstep else frozenset(),
        )

    def _shard_after_run(self, part: LocalModel, mesh: Mesh) -> LocalModel:
        if self.hybrid or self.offload:
            raise StrategyRefused(
                f"zero{self.stage} in a pipeline shards over all data ranks and keeps shards on "
                "the device. Leave out "
                "hybrid and offload."
            )
        mesh.data.broadcast_module(part.module)
        if mesh.data.size == 1:
            return part
        late = PipelineZeroOne(part, mesh.data, mesh.device_mesh)
        said = part.summary_lines
        if self.stage > 1:
            said += (
                f"in a pipeline, zero{self.stage} keeps what zero1 keeps: optimizer states are "
                "sharded.",
            )
        return replace(
            part,
            run=late.run,
            trainable_params=late.owned,
            reduce_gradients=late.reduce,
            gather_params=late.gather,
            summary_lines=said,
        )

    def _policy(self, mesh: Mesh) -> OffloadPolicy:
        return (
            CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
            if self.offload
            else OffloadPolicy()
        )


class Zero2(Zero1):
    """Optimizer states and gradients in shards."""

    stage: ClassVar[int] = 2


class Zero3(Zero1):
    """Optimizer states, gradients and parameters in shards."""

    stage: ClassVar[int] = 3


class ShardedStep:
    """One rank's steps through `fully_shard`."""

    def __init__(self, stage: int, part: LocalModel, data: Axis) -> None:
        self.stage, self.part, self.data = stage, part, data
        self.totals: Tensor | None = None
        self.summed: dist.Work | None = None
        # fully_shard takes no scalars; they stay whole, and what the optimizer steps shares their
        # memory.
        self.scalars = {name: p for name, p in part.trainable_params.items() if p.dim() == 0}
        self.shadows: dict[str, nn.Parameter] = {}
        self.sharded: dict[str, nn.Parameter] = {}
        self.lockstep: Lockstep | None = None

    def shard(self, over: DeviceMesh, unit: str, policy: OffloadPolicy) -> None:
        """Cut the module's parameters, the innermost units first."""
        scalars = {p for p in self.part.module.parameters() if p.dim() == 0}
        arguments: dict[str, Any] = {
            "mesh": over,
            "offload_policy": policy,
            "ignored_params": scalars,
        }
        root = self.part.module
        found = innermost(
            units(root, unit)
        )  # one after the other, so that all ranks can have one order
        if self.data.size > 1:
            self.lockstep = Lockstep(self.data, root, found, [*self.part.trainable_params])
            register_cleanup(self.lockstep)
        for module in [*found.values(), root]:
            module.register_forward_hook(_clone_views)
            with self.lockstep.wrap_step(module) if self.lockstep else nullcontext():
                fully_shard(
                    module,
                    reshard_after_forward=self.stage == 3 and module is not root,
                    **arguments,
                )
            assert isinstance(module, FSDPModule)
        for name, scalar in self.scalars.items():
            self.shadows[name] = nn.Parameter(_replicated(scalar.detach(), over))

    def owned(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer steps: its shard of every trainable parameter."""
        parameters = dict(self.part.module.named_parameters())
        self.sharded = {
            name: self.shadows.get(name, parameters[name]) for name in self.part.trainable_params
        }
        return self.sharded

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        outcome = self.part.forward(batch)
        if self.lockstep is not None:
            outcome = outcome._replace(loss=self.lockstep.attach_token(outcome.loss))
        if batch.is_last_microbatch:
            self.totals = outcome.step_totals
            self.summed = (
                dist.all_reduce(self.totals, group=self.data.group, async_op=True)
                if self.data.size > 1
                else None
            )
        return outcome

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """One micro-batch; gradients become means over ranks, and the objectives of all ranks
        are to be summed.
        """
        module = self.part.module
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(batch.is_last_microbatch or self.stage > 1)
        if self.lockstep is not None:
            self.lockstep.reduces = batch.is_last_microbatch or self.stage > 1
        module.set_reshard_after_backward(batch.is_last_microbatch or self.stage == 3)
        with self._naming_sharded_weights():
            loss = self.part.run(forward, scaled_for_mean(batch, self.data.size))
        if not batch.is_last_microbatch:
            return loss
        assert self.totals is not None
        if self.summed is not None:
            self.summed.wait()
        return mean_result(self.totals, self.data.size, loss.is_sum_and_count)

    @contextmanager
    def _naming_sharded_weights(self) -> Iterator[None]:
        """What torch says of a weight that is in shards when it is used, in words of the model."""
        try:
            yield
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            freed = (
                "it is gathered while that unit runs"
                if self.stage == 3
                else "it is gathered when that unit runs"
            )
            later = " zero2, where it is used after the unit has run;" if self.stage == 3 else ""
            raise StrategyRefused(
                f"zero{self.stage}: a weight of one unit is used outside of that unit, and "
                f"{freed}. Cures:{later} "
                "unit=CLASS with a class that holds both; assign the weight to the module that "
                "uses it as well, "
                "self.name = unit.weight, so that it counts as tied; ddp."
            ) from error

    def reduce(self) -> None:
        """Scalars' gradients become means; all others are already. What no rank has used has
        none.
        """
        self.part.reduce_gradients()
        lacking = {name for name, scalar in self.scalars.items() if scalar.grad is None}
        unused = lacking if self.lockstep is None else set(self.lockstep.unused(lacking))
        if used := {name: scalar for name, scalar in self.scalars.items() if name not in unused}:
            self._reduce_scalars(used)
        for name in unused - self.scalars.keys():
            self.sharded[name].grad = None

    def _reduce_scalars(self, used: dict[str, nn.Parameter]) -> None:
        """All of them in one message: every rank sends as many, used there or not."""
        gradients = [torch.zeros_like(s) if s.grad is None else s.grad for s in used.values()]
        dtype = max((gradient.dtype for gradient in gradients), key=lambda kind: kind.itemsize)
        means = self.data.all_reduce(
            torch.stack([gradient.to(dtype) for gradient in gradients])
        ).div_(self.data.size)
        for (name, scalar), mean in zip(used.items(), means.unbind(), strict=True):
            shadow = self.shadows[name]
            assert isinstance(shadow, DTensor)
            shadow.grad, scalar.grad = _replicated(mean.to(scalar.dtype), shadow.device_mesh), None

    def release(self) -> None:
        """Free what a forward pass without a backward pass has gathered."""
        self.part.reshard()
        for module in self.part.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _clone_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Outputs of their own: writing into a view would drop what gathers this unit again in the
    backward pass.
    """
    return tree_map(
        lambda item: item.clone() if isinstance(item, Tensor) and is_view(item) else item, output
    )


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
