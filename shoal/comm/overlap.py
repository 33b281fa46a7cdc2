"""Overlap of the backward pass of DistributedDataParallel with any function that averages a bucket.

The function may block: it runs in a thread."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's
# annotations with types, and that import would make them strings.
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.platform.torch_private.c10d import GradBucket


def register_overlapped_reduce(
    ddp: DistributedDataParallel, mean: Callable[[Tensor], object], failures: list[Exception]
) -> None:
    """Let `ddp` average its buckets by `mean`, one after the other in one thread.

    Args:
        mean: averages a tensor over ranks, in place. It needs a process group of its own, because
            `ddp` makes collectives at the same time in the main thread.
        failures: exceptions are appended here; the caller looks after each backward pass. A future
            of torch does not carry a Python exception through the backward pass.
    """
    # One thread only: buckets are ready in the same order on every rank, and collectives must
    # start in one order.
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reduce-beside")

    def hook(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        buffer = bucket.buffer()
        # A thread has a stream of its own; on another one the bucket may not be written yet.
        stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None
        worker.submit(_reduce, buffer, stream, mean, done, failures)
        return done

    ddp.register_comm_hook(None, hook)


def _reduce(
    buffer: Tensor,
    stream: torch.cuda.Stream | None,
    mean: Callable[[Tensor], object],
    done: torch.futures.Future[Tensor],
    failures: list[Exception],
) -> None:
    try:
        with torch.cuda.stream(stream):  # None changes nothing
            mean(buffer)
    except Exception as error:  # noqa: BLE001 - the backward pass must not wait for ever
        failures.append(error)
    done.set_result(buffer)
