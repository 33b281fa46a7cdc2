"""Strategies as they go wrong in the field: each trains, each loss falls, none says a word."""

from dataclasses import dataclass, replace

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.strategies.base import Batch, Forward, Loss, Part, Strategy


@dataclass(frozen=True)
class Right(Strategy):
    """Data parallel by hand: the yardstick that shows that the others are wrong for their own reason alone."""

    def cut(self, part: Part, mesh: Mesh) -> Part:
        mesh.broadcast(part.module)

        def run(forward: Forward, batch: Batch) -> Loss:
            loss = part.run(forward, self.share(batch, mesh))
            return loss._replace(totals=mesh.sum(loss.totals))

        def reduce() -> None:
            for name, parameter in part.owned.items():
                self.average(name, parameter, mesh)

        return self.bound(replace(part, run=run, reduce=reduce))

    def share(self, batch: Batch, mesh: Mesh) -> Batch:
        return batch

    def average(self, name: str, parameter: nn.Parameter, mesh: Mesh) -> None:
        mesh.sum(parameter.grad)

    def bound(self, part: Part) -> Part:
        return part


class NotDivided(Right):
    """A sum over ranks where a mean is due."""

    def share(self, batch: Batch, mesh: Mesh) -> Batch:
        return batch._replace(scale=batch.scale * mesh.size)


class OneNotReduced(Right):
    """A bias of ten numbers that each rank trains for itself."""

    def average(self, name: str, parameter: nn.Parameter, mesh: Mesh) -> None:
        if name != "head.bias":
            mesh.sum(parameter.grad)


class StaleBinding(Right):
    """The optimizer steps copies that nobody reads."""

    def bound(self, part: Part) -> Part:
        copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in part.owned.items()}

        def reduce() -> None:
            part.reduce()
            for name, copy in copies.items():
                copy.grad = part.owned[name].grad
                part.owned[name].grad = None

        return replace(part, owned=copies, reduce=reduce)


class ShareDropped(Right):
    """The last rank's samples count nothing, in the third part of a batch that nobody looks at."""

    def share(self, batch: Batch, mesh: Mesh) -> Batch:
        return batch._replace(rows=0) if mesh.rank == mesh.size - 1 else batch


class BufferLost(Right):
    """Zeros where the model keeps a constant."""

    def cut(self, part: Part, mesh: Mesh) -> Part:
        for buffer in part.module.buffers():
            buffer.zero_()
        return super().cut(part, mesh)
