"""ZeRO for a part with many passes, such as a pipeline's: whole parameters and gradients in a step,
states in shards.

      run       passes of all micro-batches; whole gradients add up
      reduce    to each rank the mean of its rows      all-to-all, summed in the order of ranks
      step      each rank steps its rows, which are a view of the whole parameter
      gather    rows of all ranks                      all-gather

That is ZeRO-1, also where zero2 or zero3 is asked for: a micro-batch's gradients are needed until
all are through, and parameters by every micro-batch in turn, so sharding either would save nothing
at the peak of a step.

Of a parameter in slices, a rank's slice is what is sharded:

      8 rows in 2 slices    tensor 0   rows 0 1 2 3    data 0 has 0 1, data 1 has 2 3
                            tensor 1   rows 4 5 6 7    data 0 has 4 5, data 1 has 6 7

DTensor takes the axes in the order of the mesh, data before tensor, so in its eyes data 0 has rows
0 1 4 5: every second one of 4 pieces, `_StridedShard`. `fully_shard` says it so too; a checkpoint
of either is one of the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shoal.comm.axis import Axis
from shoal.comm.deterministic import mean
from shoal.comm.equal_chunks import all_gather, all_to_all
from shoal.comm.norm import to_local
from shoal.platform.tensors import dense, flatten_tensors, unflatten_tensors
from shoal.platform.torch_private.fsdp import StridedShard
from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult
from shoal.strategies.mean_scaling import mean_result, scaled_for_mean


class PipelineZeroOne:
    """Shards of one part's parameters along dimension 0, and their steps.

    Args: mesh: all ranks as torch's engines know them; "shard" is `data`.
    """

    def __init__(self, part: LocalModel, data: Axis, mesh: DeviceMesh) -> None:
        self.part, self.data = part, data
        # Scalars have no rows; every rank steps them.
        self.cut = {name: p for name, p in part.trainable_params.items() if p.dim() > 0}
        self.rows = {
            name: _rows(to_local(parameter), data.size) for name, parameter in self.cut.items()
        }
        self.shards = {
            name: self._shard(name, parameter, mesh) for name, parameter in self.cut.items()
        }

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer steps."""
        return {
            name: self.shards.get(name, parameter)
            for name, parameter in self.part.trainable_params.items()
        }

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """All passes. Collective."""
        loss = self.part.run(forward, scaled_for_mean(batch, self.data.size))
        if not batch.is_last_microbatch:
            return loss
        return mean_result(
            self.data.all_reduce(loss.step_totals), self.data.size, loss.is_sum_and_count
        )

    def reduce(self) -> None:
        """Each rank gets the mean gradient of its rows. Collective."""
        self.part.reduce_gradients()
        self._flatten_grads()
        for name, parameter in self.part.trainable_params.items():
            if name not in self.cut and parameter.grad is not None:
                mean(parameter.grad, self.data)
        used = [name for name, parameter in self.cut.items() if parameter.grad is not None]
        for dtype in {self.cut[name].dtype: None for name in used}:
            self._scatter([name for name in used if self.cut[name].dtype == dtype])

    def gather(self) -> None:
        """All rows of all parameters on every rank. Collective."""
        for dtype in {parameter.dtype: None for parameter in self.cut.values()}:
            names = [name for name, parameter in self.cut.items() if parameter.dtype == dtype]
            held = {name: to_local(self.cut[name].detach()) for name in names}
            columns = [
                [held[name][self.rows[name][r]] for name in names] for r in range(self.data.size)
            ]
            length = max(sum(t.numel() for t in column) for column in columns)
            mine = _flat(columns[self.data.rank], length)
            everyone = mine.new_empty(self.data.size * length)
            all_gather(everyone, mine, self.data.group)
            for column, flat in zip(columns, everyone.view(self.data.size, length), strict=True):
                _unflatten(flat, column)
        self.part.gather_params()

    def _flatten_grads(self) -> None:
        """Zeros for gradients that only other ranks have; what nobody has stays without.
        Collective.
        """
        owned = self.part.trainable_params.values()
        flags = torch.tensor(
            [p.grad is not None for p in owned], dtype=torch.int64, device=self.data.device
        )
        for parameter, users in zip(owned, self.data.all_reduce(flags).tolist(), strict=True):
            if users and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _scatter(self, names: list[str]) -> None:
        size, rank = self.data.size, self.data.rank
        gradients = {name: _to_dense(self.cut[name].grad) for name in names}
        columns = [[gradients[name][self.rows[name][r]] for name in names] for r in range(size)]
        length = max(sum(t.numel() for t in column) for column in columns)
        sent = torch.cat([_flat(column, length) for column in columns])
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.data.group)
        total = received.view(size, length)[0].clone()
        for other in received.view(size, length)[1:]:
            total += other
        found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in columns[rank]]
        _unflatten(total / size, found)
        for name, gradient in zip(names, found, strict=True):
            self.shards[name].grad = _as_shard(gradient, self.shards[name])
            self.cut[name].grad = None

    def _shard(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        # One memory: what steps the shard steps the parameter.
        view = to_local(parameter.detach())[self.rows[name][self.data.rank]]
        over, placements = _layout(parameter, mesh)
        made = DTensor.from_local(
            view,
            over,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(made)


def _layout(parameter: Tensor, mesh: DeviceMesh) -> tuple[DeviceMesh, list[Placement]]:
    """How shards along dimension 0, of a parameter or of its slices, make up the whole."""
    if not isinstance(parameter, DTensor):
        return mesh["shard"], [Shard(0)]
    (sliced,) = parameter.placements
    assert isinstance(sliced, Shard)
    slices = parameter.device_mesh.size()
    return mesh["shard", "tensor"], [
        StridedShard(0, split_factor=slices) if sliced.dim == 0 else Shard(0),
        sliced,
    ]


def _rows(parameter: Tensor, ranks: int) -> list[slice]:
    """Which rows each rank has: as torch.chunk cuts them, which is how DTensor counts."""
    each = -(-parameter.shape[0] // ranks)
    return [
        slice(min(r * each, parameter.shape[0]), min((r + 1) * each, parameter.shape[0]))
        for r in range(ranks)
    ]


def _to_dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return dense(to_local(gradient))


def _flat(tensors: list[Tensor], length: int) -> Tensor:
    flat = flatten_tensors(tensors)
    return torch.nn.functional.pad(flat, (0, length - len(flat)))


def _unflatten(flat: Tensor, into: list[Tensor]) -> None:
    for tensor, piece in zip(into, unflatten_tensors(flat, into), strict=True):
        tensor.copy_(piece)


def _as_shard(gradient: Tensor, shard: Tensor) -> DTensor:
    assert isinstance(shard, DTensor)
    return DTensor.from_local(
        gradient,
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )
