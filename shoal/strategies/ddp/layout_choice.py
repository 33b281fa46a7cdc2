"""The choice of a layout and a reduce function for a run of ddp, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from shoal.comm.axis import Axis
from shoal.comm.compression import parse_reducer
from shoal.comm.compression.base import CompressedReducer, uncompressed_bytes
from shoal.comm.deterministic import needs_order
from shoal.platform.tensors import MIB
from shoal.strategies.base import LocalModel
from shoal.strategies.ddp.gradient_bucket import (
    BucketWorker,
    GradientBucket,
    bucketize_backward,
    with_own_group,
)
from shoal.strategies.ddp.gradient_reducer import GradientReducer
from shoal.strategies.ddp.overlapped_buckets import OverlappedBuckets
from shoal.strategies.ddp.reduce_functions import (
    CompressedMean,
    NamedMean,
    RankOrderMean,
    ReduceFunction,
)
from shoal.strategies.ddp.single_message import SingleMessage
from shoal.strategies.ddp.torch_engine import TorchEngine
from shoal.strategies.options import DdpOptions

SMALL_MIB = 4.0
"""Largest single message. Steps took 0.78 of the time of DistributedDataParallel for gradients of
0.07 MiB, 0.87 for 1.1 MiB and 1.0 for 8.3 MiB, on two ranks of a core each. A single message also
holds all gradients a second time at the end of a backward pass.
"""


class LayoutName(Enum):
    """Names of the three layouts."""

    SINGLE = "one message after the backward pass"
    BUCKETS = "buckets of our own while the backward pass goes on"
    ENGINE = "torch's DistributedDataParallel"


def choose_layout(options: DdpOptions, model: LocalModel, axis: Axis) -> LayoutName:
    """Return the layout of a run. The first rule that holds decides."""
    if parse_reducer(options.compress) is not None:
        # Residuals are stored by parameter name, which the engine's hook does not know.
        return LayoutName.BUCKETS
    if is_partial_model(model):
        # The engine takes no DTensors, and only one backward pass for each micro-batch.
        return LayoutName.BUCKETS
    sparse = sparse_layers(model.module)
    if sparse and needs_order(axis):
        # The engine sums sparse gradients without its hook, in any order. Our buckets make them
        # dense.
        return LayoutName.BUCKETS
    if options.allreduce != "backend" or sparse:
        # A named algorithm overlaps with the backward pass; sparse gradients stay sparse.
        return LayoutName.ENGINE
    if fits_in_single_message(model, axis, options.bucket_mb):
        # A short message costs less than the hooks and buckets of the engine.
        return LayoutName.SINGLE
    return LayoutName.ENGINE


def build_reducer(options: DdpOptions, model: LocalModel, axis: Axis) -> GradientReducer:
    """Return the reducer of a run. Collective over the world: it may make process groups."""
    chosen = choose_layout(options, model, axis)
    reduce: ReduceFunction = RankOrderMean(axis)
    if chosen is LayoutName.SINGLE:
        return GradientReducer(SingleMessage(model, axis, reduce), reduce, axis.size)
    if chosen is LayoutName.ENGINE:
        if options.allreduce != "backend":
            reduce = NamedMean(options.allreduce, axis)
        return GradientReducer(TorchEngine(model, axis, options, reduce), reduce, axis.size)
    buckets = bucketize_backward(model.trainable_params, options.bucket_mb)
    # A pipeline sends all buckets after its passes, when no other message is in flight.
    bucket_axis = axis if model.pass_traits.complete_after_run else with_own_group(axis)
    reduce = RankOrderMean(bucket_axis)
    compression = parse_reducer(options.compress)
    if compression is not None:
        summary = _bytes_summary(options.compress, compression, buckets, axis.size)
        reduce = CompressedMean(compression, bucket_axis, summary)
    layout = OverlappedBuckets(model, axis, buckets, BucketWorker(bucket_axis, reduce))
    return GradientReducer(layout, reduce, axis.size)


def _bytes_summary(
    compress: str,
    compression: CompressedReducer,
    buckets: Sequence[GradientBucket],
    num_ranks: int,
) -> str:
    """Return a line with the bytes that a rank sends in a step, compressed and uncompressed."""
    sent = 0
    uncompressed = 0
    for bucket in buckets:
        sent += compression.sent_bytes(bucket.members, bucket.dtype, num_ranks)
        uncompressed += uncompressed_bytes(bucket.num_elements, bucket.dtype, num_ranks)
    return (
        f"compress={compress}: a rank sends {sent / 1e6:,.3g} MB of gradients a step; uncompressed "
        f"{uncompressed / 1e6:,.3g} MB"
    )


def is_partial_model(model: LocalModel) -> bool:
    """Return True if this rank has shards of layers (tensor) or stages (pipeline) only."""
    return model.pass_traits.complete_after_run or model.has_sharded_params


def sparse_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers whose gradients are sparse."""
    return [name for name, layer in module.named_modules() if _has_sparse_gradient(layer)]


def _has_sparse_gradient(layer: nn.Module) -> bool:
    if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return False
    return layer.sparse and layer.weight.requires_grad


def fits_in_single_message(model: LocalModel, axis: Axis, bucket_mb: float) -> bool:
    """Return True if all gradients fit in one message.

    They must be on the CPU, all float32 or all float64, and at most SMALL_MIB and one bucket of
    `bucket_mb` MiB.
    """
    parameters = model.trainable_params.values()
    dtypes = {parameter.dtype for parameter in parameters}
    if axis.device.type != "cpu" or dtypes not in ({torch.float32}, {torch.float64}):
        return False
    size_bytes = sum(parameter.nbytes for parameter in parameters)
    return size_bytes <= min(bucket_mb, SMALL_MIB) * MIB
