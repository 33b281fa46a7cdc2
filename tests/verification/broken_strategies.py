"""Strategies as they go wrong in the field: each trains, each loss falls, none says a word."""

from dataclasses import dataclass, replace

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult, Strategy


@dataclass(frozen=True)
class Right(Strategy):
    """Data parallel by hand: the yardstick that shows that the others are wrong for their own
    reason alone.
    """

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        mesh.broadcast_module(model.module)

        def run(forward: Forward, batch: LocalBatch) -> StepResult:
            loss = model.run(forward, self.share(batch, mesh))
            return loss._replace(step_totals=mesh.all_reduce(loss.step_totals))

        def reduce() -> None:
            for name, parameter in model.trainable_params.items():
                self.average(name, parameter, mesh)

        return self.bound(replace(model, run=run, reduce_gradients=reduce))

    def share(self, batch: LocalBatch, mesh: Mesh) -> LocalBatch:
        return batch

    def average(self, name: str, parameter: nn.Parameter, mesh: Mesh) -> None:
        mesh.all_reduce(parameter.grad)

    def bound(self, part: LocalModel) -> LocalModel:
        return part


class NotDivided(Right):
    """A sum over ranks where a mean is due."""

    def share(self, batch: LocalBatch, mesh: Mesh) -> LocalBatch:
        return batch._replace(grad_weight=batch.grad_weight * mesh.size)


class OneNotReduced(Right):
    """A bias of ten numbers that each rank trains for itself."""

    def average(self, name: str, parameter: nn.Parameter, mesh: Mesh) -> None:
        if name != "head.bias":
            mesh.all_reduce(parameter.grad)


class StaleBinding(Right):
    """The optimizer steps copies that nobody reads."""

    def bound(self, part: LocalModel) -> LocalModel:
        copies = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in part.trainable_params.items()
        }

        def reduce() -> None:
            part.reduce_gradients()
            for name, copy in copies.items():
                copy.grad = part.trainable_params[name].grad
                part.trainable_params[name].grad = None

        return replace(part, trainable_params=copies, reduce_gradients=reduce)


class ShareDropped(Right):
    """The last rank's samples count nothing, in the third part of a batch that nobody looks at."""

    def share(self, batch: LocalBatch, mesh: Mesh) -> LocalBatch:
        return batch._replace(num_samples=0) if mesh.rank == mesh.size - 1 else batch


class BufferLost(Right):
    """Zeros where the model keeps a constant."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        for buffer in model.module.buffers():
            buffer.zero_()
        return super().apply(model, mesh)
