"""Distributed data parallel: every rank holds the full model and a share of each batch.

Gradients are averaged over ranks.

      rank 0   forward ── backward ▓▓▓▓▓▓▓▓ ── step
                             └ bucket 1 ┐ └ bucket 2 ┐    a bucket is reduced as soon as its
      rank 1   forward ── backward ▓▓▓▓▓▓▓▓ ── step       gradients are there, while earlier layers
                                                          still compute

      strategy.py            the strategy, its checks, and the choice of a layout and a reduce
                             function, with reasons
      gradient_reducer.py    a step, the same for both layouts
      own_buckets.py, torch_engine.py    layouts: when gradients are sent
      reduce_functions.py    the means

Three rules hold in both layouts:

[1] *Totals travel with the gradients.* Messages of gradients carry the loss sum, the count and the
    measures of a step too. The global loss costs no collective and no synchronisation.
[2] *A parameter that no rank has used keeps no gradient.* Messages carry a flag for each gradient
    that a rank has. torch's engine cannot send flags, so a first step without it finds unused
    parameters.
[3] *Sums have one order.* On the CPU every gradient is summed in the order of ranks (by the
    backend, or by `comm/deterministic.py`), so a resumed run gives the bits of an uninterrupted
    one. With `allreduce=` the order is that of the named algorithm (`comm/algorithms.py`).

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import nn

from shoal.comm.axis import Axis
from shoal.comm.compression import parse_reducer
from shoal.comm.deterministic import needs_order
from shoal.comm.mesh import Mesh, register_cleanup
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.platform.tensors import MIB
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.ddp.cost import SMALL_MIB, cost
from shoal.strategies.ddp.gradient_reducer import GradientReducer
from shoal.strategies.ddp.own_buckets import OwnBuckets, bucketize_backward
from shoal.strategies.ddp.reduce_functions import (
    CompressedMean,
    NamedMean,
    RankOrderMean,
    ReduceFunction,
)
from shoal.strategies.ddp.torch_engine import TorchEngine
from shoal.strategies.grad_checks import check_real_parameters
from shoal.strategies.options import DdpOptions

NO_PARAMETERS_MESSAGE = "strategy ddp averages gradients; the model has no trainable parameter."


class Ddp(DdpOptions, Strategy):
    """Distributed data parallel."""

    can_apply_again: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward`, `run` and `strategy_state`. Collective.

        Raises: StrategyRefused: the model has no trainable parameter; compress beside tensor or
            pipeline, or of complex parameters; allreduce beside these, or of sparse gradients.
        """
        self._check_allreduce(model, mesh)
        self._check_compress(model)
        if not model.trainable_params and not model.is_partial:  # a stage may have none
            raise StrategyRefused(NO_PARAMETERS_MESSAGE)
        if mesh.data.size == 1:
            return model
        # Means keep weights equal that begin equal: a script may have loaded some on rank 0 only.
        mesh.data.broadcast_module(model.module)
        reducer = build_reducer(self, model, mesh.data)
        register_cleanup(reducer)

        def close() -> None:
            # Hooks go first: what comes next may replace the parameters that they are on.
            reducer.close()
            model.outside_step.close()

        return replace(
            model,
            forward=reducer.forward,
            run=reducer.forward_backward,
            strategy_state=reducer.reduce.strategy_state,
            outside_step=replace(model.outside_step, close=close),
            summary_lines=(*model.summary_lines, *reducer.reduce.summary_lines),
        )

    def cost(self, step: StepCost) -> StepCost:
        """Return the cost of averaged gradients: `ddp/cost.py`."""
        return cost(self, step)

    @property
    def deviations(self) -> list[str]:
        """Sentences for the startup summary: how numbers differ from those of one device."""
        if self.compress == "none":
            return []
        return [f"compress={self.compress} is not exact: gradients arrive rounded, or late."]

    def _check_allreduce(self, model: LocalModel, mesh: Mesh) -> None:
        """Raise StrategyRefused where the named algorithm cannot average this model's gradients."""
        if self.allreduce == "backend":
            return
        sparse = sparse_layers(model.module)
        if sparse:
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} moves dense gradients, and {', '.join(sparse)} "
                "has sparse=True. Use sparse=False, or leave allreduce out."
            )
        if model.is_divided or parse_reducer(self.compress) is not None:
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} does not stand beside tensor, pipeline or "
                "compress, whose gradients are averaged in another way. Leave allreduce out."
            )
        if mesh.device.type != "cpu":
            raise StrategyRefused(
                f"ddp,allreduce={self.allreduce} moves tensors of the CPU; this run is on "
                f"{mesh.device.type}, where NCCL has algorithms of its own. Leave allreduce out; "
                "NCCL_ALGO=Ring or NCCL_ALGO=Tree chooses one."
            )

    def _check_compress(self, model: LocalModel) -> None:
        """Raise StrategyRefused where this model's gradients cannot be compressed."""
        if parse_reducer(self.compress) is None:
            return
        if model.is_divided:
            raise StrategyRefused(
                f"compress={self.compress} is for whole models, and beside tensor and pipeline a "
                "rank has a part of one. Use compress=none, or ddp alone."
            )
        check_real_parameters(model.trainable_params, self.compress)


def takes_torchs_engine(options: DdpOptions, model: LocalModel, axis: Axis) -> bool:
    """Return True if torch's engine averages gradients; False: buckets of our own."""
    if parse_reducer(options.compress) is not None or model.is_divided:
        # Residuals are stored by parameter name, which the engine's hook does not know. It takes no
        # DTensors, and only one backward pass for each micro-batch.
        return False
    if sparse_layers(model.module):
        # The engine keeps sparse gradients sparse, and sums them without its hook, in any order.
        # Our buckets make them dense.
        return not needs_order(axis)
    # A named algorithm overlaps with the backward pass, however small the model.
    return options.allreduce != "backend" or not is_small(model, axis, options.bucket_mb)


def is_small(model: LocalModel, axis: Axis, bucket_mb: float) -> bool:
    """Return True if the gradients are on the CPU, at most SMALL_MIB and one bucket."""
    size_bytes = sum(parameter.nbytes for parameter in model.trainable_params.values())
    return axis.device.type == "cpu" and size_bytes <= min(bucket_mb, SMALL_MIB) * MIB


def build_reducer(options: DdpOptions, model: LocalModel, axis: Axis) -> GradientReducer:
    """Return the reducer of a run. Collective over the world: it may make process groups."""
    reduce: ReduceFunction
    if takes_torchs_engine(options, model, axis):
        is_named = options.allreduce != "backend"
        reduce = NamedMean(options.allreduce, axis) if is_named else RankOrderMean(axis)
        return TorchEngine(model, axis, options, reduce)
    compression = parse_reducer(options.compress)
    is_whole_and_small = not model.is_divided and is_small(model, axis, options.bucket_mb)
    overlaps = not (model.is_partial or is_whole_and_small)
    buckets = bucketize_backward(model.trainable_params, options.bucket_mb)
    reduce_axis = axis
    if overlaps and axis.device.type == "cpu":
        # Messages of the backward pass do not mix with other messages of the axis.
        reduce_axis = replace(axis, group=axis.new_group())
    reduce = CompressedMean(compression, reduce_axis) if compression else RankOrderMean(reduce_axis)
    return OwnBuckets(model, axis, buckets, reduce, overlaps)


def sparse_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers whose gradients are sparse."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        and layer.sparse
        and layer.weight.requires_grad
    ]
