"""The rank-order mean: a mean over ranks whose bits do not depend on the position in a buffer.

A ring adds each chunk in another order of ranks, so with three ranks or more the last bit of a sum
depends on the element's position in its bucket (seen with Gloo on torch 2.13). A resumed run makes
its buckets again in its first step, and would differ from the uninterrupted run. Here every element
is summed in the order of ranks:

      rank 0   a0 b0 c0       all-to-all   a0 a1 a2       sum    A       all-gather   A B C
      rank 1   a1 b1 c1       ─────────>   b0 b1 b2   ──────>    B       ─────────>   A B C
      rank 2   a2 b2 c2     chunk i to i   c0 c1 c2   in order   C                    A B C

Each rank sends 2(n-1)/n of the buffer, as in a ring. Over Gloo both exchanges are cut into slices
that overlap (pairwise_exchange.py), with the same bits in the time of a ring. The
backend "shoal" always adds in the order of ranks, so there this is a plain all-reduce; on a GPU the
order is left to NCCL."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's
# annotations with types, and that import would make them strings.
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.comm import pairwise_exchange
from shoal.comm.axis import Axis
from shoal.comm.equal_chunks import gloo_group
from shoal.platform.torch_private.c10d import GradBucket
from shoal.shm_backend.group import ShoalGroup


def rank_order_mean(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Average `tensor` over all ranks in the order of ranks, in place. Collective.

    The bits of an element do not depend on its position in `tensor`.
    """
    if sums_in_order(group):
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        return tensor
    if (gloo := gloo_group(tensor, group)) is not None:
        flat = tensor.detach().reshape(-1)
        pairwise_exchange.average(gloo, flat)
        if flat.data_ptr() != tensor.data_ptr():  # `reshape` has made a copy
            tensor.copy_(flat.view_as(tensor))
        return tensor
    dist.all_reduce(tensor, group=group)
    return tensor.div_(dist.get_world_size(group))


def mean(tensor: Tensor, axis: Axis) -> Tensor:
    """Average `tensor` over the axis, in place; on the CPU in the order of ranks. Collective."""
    if needs_order(axis) or (tensor.is_cpu and not tensor.is_sparse and sums_in_order(axis.group)):
        return rank_order_mean(tensor, axis.group)
    return axis.all_reduce(tensor.div_(axis.size))


def needs_order(axis: Axis) -> bool:
    """Return True if an all-reduce over the axis could add in several orders.

    A sum of two ranks has one order. On a GPU, the order is left to NCCL.
    """
    return axis.size > 2 and axis.device.type == "cpu"


def sums_in_order(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if the group's own all-reduce adds in the order of ranks."""
    group = group or dist.group.WORLD
    return isinstance(group, ShoalGroup) and group.uses_shared_memory


def use_ordered_mean(
    ddp: DistributedDataParallel,
    axis: Axis,
    failures: list[Exception],
    look: Callable[[Tensor], object],
) -> None:
    """Let `ddp` average its buckets by `rank_order_mean` during the backward pass.
    Collective over the world.

    Args:
        axis: the axis over which `ddp` averages.
        failures: exceptions are appended here; the caller looks after each backward pass.
        look: is given each bucket of this rank before it is sent.
    """
    if sums_in_order(ddp.process_group):
        ddp.register_comm_hook((ddp.process_group, look), _mean_of_bucket)
        return
    mean = partial(rank_order_mean, group=axis.new_group())
    register_overlapped_reduce(ddp, mean, failures, look)


def _mean_of_bucket(
    state: tuple[dist.ProcessGroup, Callable[[Tensor], object]], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    process_group, look = state
    buffer, operation = bucket.buffer(), dist.ReduceOp.AVG
    look(buffer)
    if buffer.is_sparse:  # Gloo can only add such
        buffer, operation = buffer / process_group.size(), dist.ReduceOp.SUM
    work = dist.all_reduce(buffer, operation, group=process_group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def register_overlapped_reduce(
    ddp: DistributedDataParallel,
    mean: Callable[[Tensor], object],
    failures: list[Exception],
    look: Callable[[Tensor], object],
) -> None:
    """Let `ddp` average its buckets on the CPU by `mean`, one after the other in one thread.

    Args:
        mean: averages a tensor over ranks, in place. It needs a process group of its own, because
            `ddp` makes collectives at the same time in the main thread.
        failures: exceptions are appended here; the caller looks after each backward pass. A future
            of torch does not carry a Python exception through the backward pass.
        look: is given each bucket of this rank before it is averaged.
    """
    # One thread only: buckets are ready in the same order on every rank, and collectives must
    # start in one order.
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reduce-beside")

    def reduce(buffer: Tensor, done: torch.futures.Future[Tensor]) -> None:
        try:
            look(buffer)
            mean(buffer)
        except Exception as error:  # noqa: BLE001 - the backward pass must not wait for ever
            failures.append(error)
        done.set_result(buffer)

    def hook(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        worker.submit(reduce, bucket.buffer(), done)
        return done

    ddp.register_comm_hook(None, hook)
