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
    """ZeRO-1: shard optimizer states."""

    stage: ClassVar[int] = 1

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward`, `run`, `trainable_params` and `reduce_gradients`. Collective.

        The parameters of the module become shards, in place. In a pipeline, see
        `pipeline_zero1.py`.

        Raises: StrategyRefused: no trainable parameter; hybrid or offload in a pipeline.
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
        is_hybrid = "replicate" in (mesh.device_mesh.mesh_dim_names or ())
        shard_mesh = mesh.device_mesh[("replicate", "shard") if is_hybrid else "shard"]
        engine.shard(shard_mesh, self.unit, self._offload_policy(mesh))
        return replace(
            model,
            forward=engine.forward,
            run=engine.run,
            trainable_params=engine.trainable_params(),
            reduce_gradients=engine.reduce,
            reshard=engine.release,
            collective_forward=True,
            maybe_unused=engine.lockstep.lacking if engine.lockstep else frozenset(),
        )

    def _shard_after_run(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Shard optimizer states only: gradients are complete after all passes. Collective."""
        if self.hybrid or self.offload:
            raise StrategyRefused(
                f"zero{self.stage} in a pipeline shards over all data ranks and keeps shards on "
                "the device. Leave out hybrid and offload."
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
            trainable_params=engine.trainable_params,
            reduce_gradients=engine.reduce,
            gather_params=engine.gather,
            summary_lines=summary_lines,
        )

    def _offload_policy(self, mesh: Mesh) -> OffloadPolicy:
        if not self.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")


class Zero2(Zero1):
    """ZeRO-2: shard optimizer states and gradients."""

    stage: ClassVar[int] = 2


class Zero3(Zero1):
    """ZeRO-3: shard optimizer states, gradients and parameters."""

    stage: ClassVar[int] = 3


class ShardedStep:
    """One rank's steps through `fully_shard`.

    `fully_shard` takes no 0-dimensional parameters. These *scalars* are replicated. The optimizer
    steps a DTensor that shares the memory of the scalar, for it takes no mix of both kinds.

    Attributes:
        totals: totals of this step; their sum over ranks when `totals_work` is done.
        scalars: 0-dimensional trainable parameters, by name.
        replicated: their DTensors, by name.
        sharded: parameters that the optimizer steps, by name.
        lockstep: None on one rank.
    """

    def __init__(self, stage: int, model: LocalModel, data: Axis) -> None:
        self.stage = stage
        self.model = model
        self.data = data
        self.totals: Tensor | None = None
        self.totals_work: dist.Work | None = None
        self.scalars = {name: p for name, p in model.trainable_params.items() if p.dim() == 0}
        self.replicated: dict[str, nn.Parameter] = {}
        self.sharded: dict[str, nn.Parameter] = {}
        self.lockstep: Lockstep | None = None

    def shard(self, mesh: DeviceMesh, unit: str, policy: OffloadPolicy) -> None:
        """Shard the parameters of all units, and then of the module around them. Collective.

        Args: unit: class name of the units; empty for the rule of `wrap_units`.
        """
        root = self.model.module
        arguments: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": policy,
            "ignored_params": {p for p in root.parameters() if p.dim() == 0},
        }
        # Units inside each other would run at the same time, and have no order.
        wrapped = innermost(units(root, unit))
        if self.data.size > 1:
            self.lockstep = Lockstep(self.data, root, wrapped, [*self.model.trainable_params])
            register_cleanup(self.lockstep)
        for module in [*wrapped.values(), root]:
            module.register_forward_hook(_clone_views)
            with self.lockstep.wrap_step(module) if self.lockstep else nullcontext():
                fully_shard(
                    module,
                    reshard_after_forward=self.stage == 3 and module is not root,
                    **arguments,
                )
            assert isinstance(module, FSDPModule)
        for name, scalar in self.scalars.items():
            self.replicated[name] = nn.Parameter(_replicated(scalar.detach(), mesh))

    def trainable_params(self) -> dict[str, nn.Parameter]:
        """Return this rank's shard of every trainable parameter, by name, for its optimizer."""
        parameters = dict(self.model.module.named_parameters())
        self.sharded = {
            name: self.replicated.get(name, parameters[name])
            for name in self.model.trainable_params
        }
        return self.sharded

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """Compute a micro-batch and its loss. The last one starts the sum of the totals."""
        output = self.model.forward(batch)
        if self.lockstep is not None:
            output = output._replace(loss=self.lockstep.attach_token(output.loss))
        if batch.is_last_microbatch:
            self.totals = output.step_totals
            self.totals_work = None
            if self.data.size > 1:
                self.totals_work = dist.all_reduce(
                    self.totals, group=self.data.group, async_op=True
                )
        return output

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute both passes of one micro-batch. Collective.

        The engine reduces gradients to means over ranks. `scaled_for_mean` turns them into sums.
        """
        module = self.model.module
        assert isinstance(module, FSDPModule)
        reduces = batch.is_last_microbatch or self.stage > 1
        module.set_requires_gradient_sync(reduces)
        if self.lockstep is not None:
            self.lockstep.reduces = reduces
        module.set_reshard_after_backward(batch.is_last_microbatch or self.stage == 3)
        with self._explain_sharded_weights():
            result = self.model.run(forward, scaled_for_mean(batch, self.data.size))
        if not batch.is_last_microbatch:
            return result
        assert self.totals is not None
        if self.totals_work is not None:
            self.totals_work.wait()
        return mean_result(result, self.totals, self.data.size)

    @contextmanager
    def _explain_sharded_weights(self) -> Iterator[None]:
        """Replace torch's error about a weight that is sharded when it is used, by the cures."""
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
                "uses it as well, self.name = unit.weight, so that it counts as tied; ddp."
            ) from error

    def reduce(self) -> None:
        """Average the gradients of scalars, and remove unused ones. Collective.

        The engine has averaged all others. A parameter that no rank has used gets `.grad = None`.
        """
        self.model.reduce_gradients()
        lacking = {name for name, scalar in self.scalars.items() if scalar.grad is None}
        unused = lacking if self.lockstep is None else set(self.lockstep.unused(lacking))
        used = {name: scalar for name, scalar in self.scalars.items() if name not in unused}
        if used:
            self._reduce_scalars(used)
        for name in unused - self.scalars.keys():
            self.sharded[name].grad = None

    def _reduce_scalars(self, used: dict[str, nn.Parameter]) -> None:
        """Average the gradients of scalars in one message. Collective.

        Every rank sends a value for each, 0 if it did not use the scalar.
        """
        gradients = [torch.zeros_like(s) if s.grad is None else s.grad for s in used.values()]
        dtype = max((gradient.dtype for gradient in gradients), key=lambda kind: kind.itemsize)
        means = self.data.all_reduce(
            torch.stack([gradient.to(dtype) for gradient in gradients])
        ).div_(self.data.size)
        for (name, scalar), mean in zip(used.items(), means.unbind(), strict=True):
            stepped = self.replicated[name]
            assert isinstance(stepped, DTensor)
            stepped.grad = _replicated(mean.to(scalar.dtype), stepped.device_mesh)
            scalar.grad = None

    def release(self) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered."""
        self.model.reshard()
        for module in self.model.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _clone_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Forward hook: clone outputs that are views.

    The engine gathers a unit again by a node on its outputs. Writing into a view would replace that
    node.
    """
    return tree_map(
        lambda item: item.clone() if isinstance(item, Tensor) and is_view(item) else item, output
    )


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
