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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shoal.comm.assembly import as_shard
from shoal.comm.axis import Axis
from shoal.comm.deterministic import mean
from shoal.comm.equal_chunks import all_gather, all_to_all
from shoal.comm.mesh import Mesh, ensure_group
from shoal.comm.norm import to_local
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.platform.tensors import dense, flatten_tensors, unflatten_tensors
from shoal.platform.torch_private.fsdp import StridedShard
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult, Strategy
from shoal.strategies.local_step import mean_result, scaled_for_mean
from shoal.strategies.options import ZeroOptions
from shoal.strategies.zero.cost import cost
from shoal.strategies.zero.sharded_step import ShardedStep
from shoal.weights.deferred_init import broadcast_filled


class Zero1(ZeroOptions, Strategy):
    """ZeRO-1: shard optimizer states."""

    takes_empty_weights: ClassVar[bool] = True
    stage: ClassVar[int] = 1

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward`, `run`, `call`, `trainable_params` and `reduce_gradients`. Collective.

        The parameters of the module become shards, in place. In a pipeline, see `PipelineZeroOne`.

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


class PipelineZeroOne:
    """ZeRO-1 for a pipeline: full parameters and gradients in a step, optimizer states in shards.

          run       passes of all micro-batches; full gradients are summed
          reduce    each rank gets the mean of its rows     all-to-all, summed in the order of ranks
          step      each rank steps its rows, a view of the full parameter
          gather    rows of all ranks                        all-gather

    zero2 and zero3 do the same in a pipeline. Gradients are needed until all micro-batches are
    through, and parameters by every micro-batch in turn, so sharding them would not lower the peak
    of a step.

    Beside tensor parallelism, a rank's shard of a parameter is sharded once more:

          8 rows in 2 tensor shards   tensor 0   rows 0 1 2 3    data 0 has 0 1, data 1 has 2 3
                                      tensor 1   rows 4 5 6 7    data 0 has 4 5, data 1 has 6 7

    DTensor applies placements in the order of mesh dims, data before tensor. In that order, data 0
    has rows 0 1 4 5: every second one of 4 pieces, a `_StridedShard`. `fully_shard` uses the same
    placement, so either loads the checkpoints of the other.

    Args: mesh: all ranks as a torch mesh, whose dim "shard" is `data`.

    Attributes:
        sharded: parameters with dims, by name. A scalar has no rows; every rank steps it.
        rows: for each of them the rows of every data rank.
        shards: for each of them this rank's rows as a DTensor, a view of the full parameter.
    """

    def __init__(self, model: LocalModel, data: Axis, mesh: DeviceMesh) -> None:
        self.model = model
        self.data = data
        self.sharded = {name: p for name, p in model.trainable_params.items() if p.dim() > 0}
        self.rows = {
            name: _rows_of_ranks(to_local(parameter), data.size)
            for name, parameter in self.sharded.items()
        }
        self.shards = {
            name: self._shard(name, parameter, mesh) for name, parameter in self.sharded.items()
        }

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute all passes of a step. Collective."""
        result = self.model.run(forward, scaled_for_mean(batch, self.data.size))
        if not batch.is_last_microbatch:
            return result
        totals = self.data.all_reduce(result.step_totals)
        return mean_result(result, totals, self.data.size)

    def reduce(self) -> None:
        """Give each rank the mean gradient of its rows. Collective."""
        self.model.reduce_gradients()
        self._fill_missing_grads()
        for name, parameter in self.model.trainable_params.items():
            if name not in self.sharded and parameter.grad is not None:
                mean(parameter.grad, self.data)
        used = [name for name, parameter in self.sharded.items() if parameter.grad is not None]
        if used:
            self._reduce_scatter(used)

    def gather(self) -> None:
        """Copy each rank's rows of all parameters to all ranks. Collective."""
        if self.sharded:
            pieces, length = self._pieces_of_ranks(
                {name: to_local(parameter.detach()) for name, parameter in self.sharded.items()}
            )
            sent = _flat(pieces[self.data.rank], length)
            received = sent.new_empty(self.data.size * length)
            all_gather(received, sent, self.data.group)
            for of_rank, flat in zip(pieces, received.view(self.data.size, length), strict=True):
                _unflatten(flat, of_rank)
        self.model.gather_params()

    def _fill_missing_grads(self) -> None:
        """Set zeros for gradients that only other ranks have. Collective.

        A parameter that no rank has used stays without a gradient.
        """
        parameters = self.model.trainable_params.values()
        has_grad = [parameter.grad is not None for parameter in parameters]
        num_users = self.data.sum_of_host_numbers(has_grad)
        for parameter, num_ranks in zip(parameters, num_users, strict=True):
            if num_ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _pieces_of_ranks(self, tensors: Mapping[str, Tensor]) -> tuple[list[list[Tensor]], int]:
        """Return for each data rank its rows of all tensors, and the largest number of values."""
        pieces = [
            [tensor[self.rows[name][rank]] for name, tensor in tensors.items()]
            for rank in range(self.data.size)
        ]
        return pieces, max(sum(piece.numel() for piece in of_rank) for of_rank in pieces)

    def _reduce_scatter(self, names: Sequence[str]) -> None:
        """Replace full gradients by the means of this rank's rows. Collective.

        An all-to-all and a sum in the order of ranks, so that the bits are those of ddp.
        """
        size = self.data.size
        pieces, length = self._pieces_of_ranks(
            {
                name: dense(to_local(parameter.grad))
                for name, parameter in self.sharded.items()
                if parameter.grad is not None
            }
        )
        sent = torch.cat([_flat(of_rank, length) for of_rank in pieces])
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.data.group)
        first, *others = received.view(size, length)
        total = first.clone()
        for other in others:
            total += other
        means = [
            torch.empty_like(piece, memory_format=torch.contiguous_format)
            for piece in pieces[self.data.rank]
        ]
        _unflatten(total / size, means)
        for name, gradient in zip(names, means, strict=True):
            shard = self.shards[name]
            assert isinstance(shard, DTensor)
            shard.grad = as_shard(gradient, shard)
            self.sharded[name].grad = None

    def _shard(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        """Return this rank's rows as a DTensor. Stepping them steps the full parameter."""
        view = to_local(parameter.detach())[self.rows[name][self.data.rank]]
        shard_mesh, placements = _placements(parameter, mesh)
        shard = DTensor.from_local(
            view,
            shard_mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(shard)


def _placements(parameter: Tensor, mesh: DeviceMesh) -> tuple[DeviceMesh, list[Placement]]:
    """Return the mesh and placements of shards along dim 0, of a parameter or of its shards."""
    if not isinstance(parameter, DTensor):
        return mesh["shard"], [Shard(0)]
    (tensor_placement,) = parameter.placements
    assert isinstance(tensor_placement, Shard)
    data_placement: Placement = Shard(0)
    if tensor_placement.dim == 0:
        data_placement = StridedShard(0, split_factor=parameter.device_mesh.size())
    return mesh["shard", "tensor"], [data_placement, tensor_placement]


def _rows_of_ranks(parameter: Tensor, num_ranks: int) -> list[slice]:
    """Return the rows of each rank, divided as by torch.chunk, which DTensor uses too."""
    num_rows = parameter.shape[0]
    per_rank = -(-num_rows // num_ranks)
    return [
        slice(min(rank * per_rank, num_rows), min((rank + 1) * per_rank, num_rows))
        for rank in range(num_ranks)
    ]


def _flat(tensors: list[Tensor], length: int) -> Tensor:
    """Return the tensors one after the other, padded to `length`: all ranks send as much."""
    flat = flatten_tensors(tensors)
    return torch.nn.functional.pad(flat, (0, length - len(flat)))


def _unflatten(flat: Tensor, into: list[Tensor]) -> None:
    """Copy consecutive values of `flat` to the tensors `into`."""
    for tensor, piece in zip(into, unflatten_tensors(flat, into), strict=True):
        tensor.copy_(piece)
