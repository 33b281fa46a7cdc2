"""The choice of a layout and a reduce function for a run of ddp, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from shoal.comm.axis import Axis
from shoal.comm.compression.reducers import CompressedReducer, parse, uncompressed_bytes
from shoal.comm.deterministic import needs_order
from shoal.platform.tensors import MIB
from shoal.strategies.base import LocalModel
from shoal.strategies.ddp.bucket_worker import BucketWorker, with_own_group
from shoal.strategies.ddp.gradient_bucket import GradientBucket, bucketize_backward
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
"""Largest single message. Steps took 0.78 of those with DistributedDataParallel for gradients of
0.07 MiB, 0.87 for 1.1 and as long for 8.3, on two ranks of a core each; and these gradients are
there twice at the end of a backward pass."""


class LayoutName(Enum):
    """The three layouts of gradients."""

    SINGLE = "one message after the backward pass"
    BUCKETS = "buckets of our own while the backward pass goes on"
    ENGINE = "torch's DistributedDataParallel"


def choose_layout(options: DdpOptions, part: LocalModel, axis: Axis) -> LayoutName:
    """Return the layout of a run. The first rule that holds decides."""
    if parse(options.compress) is not None:
        # Error feedback belongs to parameters by name, which the engine's hook does not know.
        return LayoutName.BUCKETS
    if is_partial_model(part):
        # The engine takes no sliced parameters, and one backward pass a micro-batch.
        return LayoutName.BUCKETS
    sparse = sparse_layers(part.module)
    if sparse and needs_order(axis):
        # The engine sums sparse gradients past its hook, in any order; our buckets make them dense.
        return LayoutName.BUCKETS
    if options.allreduce != "backend" or sparse:
        # A named algorithm is to overlap with the backward pass; sparse gradients stay sparse.
        return LayoutName.ENGINE
    if fits_in_single_message(part, axis, options.bucket_mb):
        # So short a message costs less than the engine's hooks and buckets.
        return LayoutName.SINGLE
    return LayoutName.ENGINE


def build_reducer(options: DdpOptions, part: LocalModel, axis: Axis) -> GradientReducer:
    """Return what averages the gradients of a run. Every rank of the world makes it together."""
    build = {
        LayoutName.SINGLE: _single_message,
        LayoutName.BUCKETS: _overlapped_buckets,
        LayoutName.ENGINE: _torch_engine,
    }
    return build[choose_layout(options, part, axis)](options, part, axis)


def _single_message(_: DdpOptions, part: LocalModel, axis: Axis) -> GradientReducer:
    reduce = RankOrderMean(axis)
    return GradientReducer(SingleMessage(part, axis, reduce), reduce, axis.size)


def _overlapped_buckets(options: DdpOptions, part: LocalModel, axis: Axis) -> GradientReducer:
    compression = parse(options.compress)
    buckets = bucketize_backward(part.trainable_params, options.bucket_mb)
    # A pipeline sends all buckets after its passes, when nothing else is under way.
    own_axis = axis if part.pass_traits.complete_after_run else with_own_group(axis)
    reduce: ReduceFunction = RankOrderMean(own_axis)
    if compression is not None:
        summary = _bytes_summary(options.compress, compression, buckets, axis.size)
        reduce = CompressedMean(compression, own_axis, summary)
    layout = OverlappedBuckets(part, axis, buckets, BucketWorker(own_axis, reduce))
    return GradientReducer(layout, reduce, axis.size)


def _torch_engine(options: DdpOptions, part: LocalModel, axis: Axis) -> GradientReducer:
    reduce: ReduceFunction = RankOrderMean(axis)
    if options.allreduce != "backend":
        reduce = NamedMean(options.allreduce, axis)
    return GradientReducer(TorchEngine(part, axis, options, reduce), reduce, axis.size)


def _bytes_summary(
    compress: str,
    compression: CompressedReducer,
    buckets: Sequence[GradientBucket],
    num_ranks: int,
) -> str:
    """Say what a rank sends for gradients in a step, and what it would send uncompressed."""
    sent = 0
    uncompressed = 0
    for bucket in buckets:
        sent += compression.sent_bytes(bucket.members, bucket.dtype, num_ranks)
        uncompressed += uncompressed_bytes(bucket.num_elements, bucket.dtype, num_ranks)
    return (
        f"compress={compress}: a rank sends {sent / 1e6:,.3g} MB of gradients a step; uncompressed "
        f"{uncompressed / 1e6:,.3g} MB"
    )


def is_partial_model(part: LocalModel) -> bool:
    """Return if this rank has slices or stages of the model, beside tensor or in a pipeline."""
    return part.pass_traits.complete_after_run or part.has_sharded_params


def sparse_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers whose gradients are sparse."""
    return [name for name, layer in module.named_modules() if _has_sparse_gradient(layer)]


def _has_sparse_gradient(layer: nn.Module) -> bool:
    if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return False
    return layer.sparse and layer.weight.requires_grad


def fits_in_single_message(part: LocalModel, axis: Axis, bucket_mb: float) -> bool:
    """Return if one message takes all gradients.

    They are on the CPU, of one plain dtype, small, and not more than a bucket of `bucket_mb` MiB.
    """
    parameters = part.trainable_params.values()
    dtypes = {parameter.dtype for parameter in parameters}
    if axis.device.type != "cpu" or dtypes not in ({torch.float32}, {torch.float64}):
        return False
    size_bytes = sum(parameter.nbytes for parameter in parameters)
    return size_bytes <= min(bucket_mb, SMALL_MIB) * MIB
