"""The choice of a layout and a reduce function for a run of ddp, each with its reason."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shoal.comm.axis import Axis
from shoal.comm.compression import parse_reducer
from shoal.comm.deterministic import needs_order
from shoal.platform.tensors import MIB
from shoal.strategies.base import LocalModel
from shoal.strategies.ddp.gradient_reducer import GradientReducer
from shoal.strategies.ddp.own_buckets import OwnBuckets, bucketize_backward
from shoal.strategies.ddp.reduce_functions import (
    CompressedMean,
    NamedMean,
    RankOrderMean,
    ReduceFunction,
)
from shoal.strategies.ddp.torch_engine import TorchEngine
from shoal.strategies.options import DdpOptions

SMALL_MIB = 4.0
"""Gradients of a small model. Up to this size on the CPU, messages after the backward pass take
less time than the hooks and buckets of DistributedDataParallel.
"""


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
    if compression is None:
        reduce = RankOrderMean(reduce_axis)
    else:
        reduce = CompressedMean(compression, reduce_axis)
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
