"""ZeRO for a part with many passes, such as a pipeline's: whole parameters and gradients in a step, states in shards.

      run       passes of all micro-batches; whole gradients add up
      reduce    to each rank the mean of its rows      all-to-all, summed in the order of ranks
      step      each rank steps its rows, which are a view of the whole parameter
      gather    rows of all ranks                      all-gather

That is ZeRO-1, also where zero2 or zero3 is asked for: a micro-batch's gradients are needed until all are through, and
parameters by every micro-batch in turn, so sharding either would save nothing at the peak of a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.comm.axis import Axis
from shoal.comm.ordered import all_gather
from shoal.strategies.base import Batch, Forward, Loss, Part
from shoal.strategies.late import fill, mean


class LateShards:
    """Shards of one part's parameters along dimension 0, and their steps.

    Args: over: the ranks of `data` as torch's engines know them.
    """

    def __init__(self, part: Part, data: Axis, over: DeviceMesh) -> None:
        self.part, self.data = part, data
        # Scalars have no rows; every rank steps them.
        self.cut = {name: p for name, p in part.owned.items() if p.dim() > 0}
        self.shards = {name: self._shard(parameter, over) for name, parameter in self.cut.items()}
        self.rows = {name: _rows(parameter, data.size) for name, parameter in self.cut.items()}

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer steps."""
        return {name: self.shards.get(name, parameter) for name, parameter in self.part.owned.items()}

    def run(self, forward: Forward, batch: Batch) -> Loss:
        """All passes. Collective."""
        loss = self.part.run(forward, batch._replace(scale=batch.scale * self.data.size))
        if not batch.last:
            return loss
        return Loss(self.data.sum(loss.totals) / self.data.size, loss.weighed)

    def reduce(self) -> None:
        """Each rank gets the mean gradient of its rows. Collective."""
        self.part.reduce()
        fill(self.part.owned, self.data)
        for name, parameter in self.part.owned.items():
            if name not in self.cut and parameter.grad is not None:
                mean(parameter.grad, self.data)
        used = [name for name, parameter in self.cut.items() if parameter.grad is not None]
        for dtype in {self.cut[name].dtype: None for name in used}:
            self._scatter([name for name in used if self.cut[name].dtype == dtype])

    def gather(self) -> None:
        """All rows of all parameters on every rank. Collective."""
        for dtype in {parameter.dtype: None for parameter in self.cut.values()}:
            names = [name for name, parameter in self.cut.items() if parameter.dtype == dtype]
            columns = [[self.cut[name].detach()[self.rows[name][r]] for name in names] for r in range(self.data.size)]
            length = max(sum(t.numel() for t in column) for column in columns)
            mine = _flat(columns[self.data.rank], length)
            everyone = mine.new_empty(self.data.size * length)
            all_gather(everyone, mine, group=self.data.group)
            for column, flat in zip(columns, everyone.view(self.data.size, length), strict=True):
                _unflatten(flat, column)
        self.part.gather()

    def _scatter(self, names: list[str]) -> None:
        size, rank = self.data.size, self.data.rank
        gradients = {name: self.cut[name].grad for name in names}
        columns = [[_rows_of(gradients[name], self.rows[name][r]) for name in names] for r in range(size)]
        length = max(sum(t.numel() for t in column) for column in columns)
        sent = torch.cat([_flat(column, length) for column in columns])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.data.group)
        total = received.view(size, length)[0].clone()
        for other in received.view(size, length)[1:]:
            total += other
        found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in columns[rank]]
        _unflatten(total / size, found)
        for name, gradient in zip(names, found, strict=True):
            self.shards[name].grad = _as_shard(gradient, self.shards[name])
            self.cut[name].grad = None

    def _shard(self, parameter: nn.Parameter, over: DeviceMesh) -> nn.Parameter:
        rows = _rows(parameter, self.data.size)[self.data.rank]
        view = parameter.detach()[rows]  # one memory: what steps the shard steps the parameter
        made = DTensor.from_local(
            view, over, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return nn.Parameter(made)


def _rows(parameter: Tensor, ranks: int) -> list[slice]:
    """Which rows each rank has: as torch.chunk cuts them, which is how DTensor counts."""
    each = -(-parameter.shape[0] // ranks)
    return [slice(min(r * each, parameter.shape[0]), min((r + 1) * each, parameter.shape[0])) for r in range(ranks)]


def _rows_of(gradient: Tensor | None, rows: slice) -> Tensor:
    assert gradient is not None
    return gradient[rows]


def _flat(tensors: list[Tensor], length: int) -> Tensor:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return torch.nn.functional.pad(flat, (0, length - len(flat)))


def _unflatten(flat: Tensor, into: list[Tensor]) -> None:
    start = 0
    for tensor in into:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def _as_shard(gradient: Tensor, shard: Tensor) -> DTensor:
    assert isinstance(shard, DTensor)
    return DTensor.from_local(
        gradient, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
