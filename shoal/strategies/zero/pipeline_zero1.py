"""ZeRO-1 for a pipeline: full parameters and gradients during a step, optimizer states in shards.

      run       passes of all micro-batches; full gradients are summed
      reduce    each rank gets the mean of its rows      all-to-all, summed in the order of ranks
      step      each rank steps its rows, a view of the full parameter
      gather    rows of all ranks                        all-gather

zero2 and zero3 do the same in a pipeline. Gradients are needed until all micro-batches are through,
and parameters by every micro-batch in turn, so sharding them would not lower the peak of a step.

Beside tensor parallelism, a rank's shard of a parameter is sharded once more:

      8 rows in 2 tensor shards   tensor 0   rows 0 1 2 3    data 0 has 0 1, data 1 has 2 3
                                  tensor 1   rows 4 5 6 7    data 0 has 4 5, data 1 has 6 7

DTensor applies placements in the order of mesh dims, data before tensor. In that order, data 0 has
rows 0 1 4 5: every second one of 4 pieces, a `_StridedShard`. `fully_shard` uses the same
placement, so either loads the checkpoints of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shoal.comm.assembly import as_shard
from shoal.comm.axis import Axis
from shoal.comm.deterministic import mean
from shoal.comm.equal_chunks import all_gather, all_to_all
from shoal.comm.norm import to_local
from shoal.platform.tensors import dense, flatten_tensors, unflatten_tensors
from shoal.platform.torch_private.fsdp import StridedShard
from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult
from shoal.strategies.local_step import mean_result, scaled_for_mean


class PipelineZeroOne:
    """Shards of the parameters of one rank's stages along dim 0, and their steps.

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
