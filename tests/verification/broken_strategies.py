"""Strategies with typical errors. All of them train, all losses fall, and none reports an error."""

from dataclasses import dataclass, replace

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult, Strategy


@dataclass(frozen=True)
class Right(Strategy):
    """Correct data parallelism. The other strategies differ from it in one error each."""

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
    """Sums the gradients over ranks in place of a mean."""

    def share(self, batch: LocalBatch, mesh: Mesh) -> LocalBatch:
        return batch._replace(grad_weight=batch.grad_weight * mesh.size)


class OneNotReduced(Right):
    """Leaves one bias of ten values without an average over ranks."""

    def average(self, name: str, parameter: nn.Parameter, mesh: Mesh) -> None:
        if name != "head.bias":
            mesh.all_reduce(parameter.grad)


class StaleBinding(Right):
    """Gives the optimizer copies of the parameters, which the model does not read."""

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
    """Drops the samples of the last rank."""

    def share(self, batch: LocalBatch, mesh: Mesh) -> LocalBatch:
        return batch._replace(num_samples=0) if mesh.rank == mesh.size - 1 else batch


class BufferLost(Right):
    """Overwrites the constants of the model with zeros."""

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        for buffer in model.module.buffers():
            buffer.zero_()
        return super().apply(model, mesh)
