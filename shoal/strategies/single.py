"""One device: the local model from which all strategies start, and the strategy `single`."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.strategies.base import ExampleBatch, LocalModel, Strategy
from shoal.strategies.local_step import compute_weighted_loss, run_microbatch
from shoal.strategies.options import ONE_RANK, NoOptions
from shoal.weights.deferred_init import DeferredWeights


class Single(NoOptions, Strategy):
    """The reference with which every other strategy is compared."""

    can_apply_again: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Return `model` unchanged. Raises StrategyRefused in a world of several ranks."""
        if mesh.data.size > 1:
            raise StrategyRefused(ONE_RANK.format(ranks=mesh.data.size))
        return model

    def cost(self, step: StepCost) -> StepCost:
        """Return `step`: one rank holds and computes everything."""
        return step


def single_device(
    module: nn.Module,
    example: ExampleBatch | None = None,
    weights: DeferredWeights | None = None,
) -> LocalModel:
    """Return the local model of a world of one rank: the full model, without communication.

    Args:
        example: the first batch, if it is known already.
        weights: those of the model that have no memory yet; None if all have.
    """
    trainable = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    return LocalModel(
        module,
        compute_weighted_loss,
        run_microbatch,
        trainable,
        example=example,
        weights=weights,
    )
